// The compiled core of scheduler/core_*.py once more, in C++: the yardstick of `bench planner`, not a part of the runtime.
// The same packed buffer (scheduler/core_layout.py), the same results bit for bit.
// Build: c++ -O3 -march=native -ffp-contract=off -shared -fPIC -o planner.so planner.cpp
#include <algorithm>
#include <cstdint>
#include <ctime>

namespace {

using i32 = std::int32_t;
using i64 = std::int64_t;

constexpr i32 EMPTY = -1, NO_SUCH_SLOT = -2, MAX_AGE = 2147483647;
constexpr i64 MAX_TOKENS = 2147483647;
constexpr i64 EXACT_QUOTIENT = i64(1) << 52;
constexpr i64 SHARE_PARTS = 1024;

// Words of the header.
enum { EXPERTS, WORKERS, SLOTS, COPY_CAP, TILE_TOKENS, COMPACTNESS, COPIES, SHARES, MAX_TILES, BASE_MAX_TILES,
       WITHIN_MAX_TILES, TOTAL_TILES, TRIED, COMPACTNESS_SHARE, LEAST_COST, MOST_COST, BOUND_TILES, HEADER };

struct Parts {
    i64 E, N, R, C, S, V;
    i32 *header, *assign, *slots, *used, *copies, *shares, *primary, *demand, *head, *homed, *tiles, *age, *owner, *after,
        *remainder, *reserved, *cost, *load, *rank, *base, *checked, *lowered, *known, *full, *sent, *received, *homed_from, *where,
        *member, *reach, *undo;

    explicit Parts(i32 *b)
        : E(b[EXPERTS]), N(b[WORKERS]), R(b[SLOTS]), C(b[COPY_CAP]), S(N * R), V((N + 31) / 32) {
        auto take = [&b](i64 n) { i32 *at = b; b += n; return at; };
        header = take(HEADER);
        assign = take(E + S);
        slots = take(S);
        used = take(S);
        copies = take(3 * C);
        shares = take(4 * S);
        primary = take(E);
        demand = take(E);
        head = take(E);
        homed = take(E);
        tiles = take(E + S);
        age = take(S);
        owner = take(S);
        after = take(S);
        remainder = take(S);
        reserved = take(S);
        cost = take(N);
        load = take(N);
        rank = take(N);
        base = take(N);
        checked = take(N);
        lowered = take(N);
        known = take(N);
        full = take(N);
        sent = take(N);
        received = take(N);
        homed_from = take(N + 1);
        where = take(E * N);
        member = take(E * V);
        reach = take(N * V);
        undo = take(5 * C);
    }
};

inline i64 portion(i64 k, i64 part, i64 whole) {
    i64 product = k * part;
    return product < EXACT_QUOTIENT ? i64(double(product) / double(whole)) : product / whole;
}

void bind(Parts &p, i64 s, i32 e) {
    i64 w = p.owner[s];
    i32 old = p.slots[s];
    if (old >= 0) {
        p.where[old * p.N + w] = -1;
        p.member[old * p.V + w / 32] &= ~(1u << (w % 32));
        i32 at = p.head[old];
        if (at == s) {
            p.head[old] = p.after[s];
        } else {
            while (p.after[at] != s) at = p.after[at];
            p.after[at] = p.after[s];
        }
    }
    p.slots[s] = e;
    if (e >= 0) {
        p.where[e * p.N + w] = i32(p.E + s);
        p.member[e * p.V + w / 32] |= 1u << (w % 32);
        i32 at = p.head[e];
        if (at < 0 || at > s) {
            p.after[s] = at;
            p.head[e] = i32(s);
        } else {
            while (p.after[at] >= 0 && p.after[at] < s) at = p.after[at];
            p.after[s] = p.after[at];
            p.after[at] = i32(s);
        }
    }
}

// θ of the target.
i64 threshold(const Parts &p, const i64 *demand, i64 M) {
    i64 theta = p.header[COMPACTNESS], share = p.header[COMPACTNESS_SHARE], total = 0;
    if (share == 0) return theta;
    for (i64 e = 0; e < p.E; ++e) total += (demand[e] + M - 1) / M;
    return std::max(theta, share * total / (SHARE_PARTS * p.N));
}

// The least T with Σ_w ⌊T/c_w⌋ >= total.
i64 least_load(const Parts &p, i64 total) {
    if (p.header[MOST_COST] == 1) return (total + p.N - 1) / p.N;
    double inverse = 0.0;
    for (i64 w = 0; w < p.N; ++w) inverse += 1.0 / p.cost[w];
    i64 low = i64(double(total) / inverse) - 2, high = i64(double(total + p.N) / inverse) + 2;
    while (high - low > 1) {
        i64 middle = (low + high) >> 1, whole = 0;
        if (middle > 0)
            for (i64 w = 0; w < p.N; ++w) whole += middle / p.cost[w];
        (whole >= total ? high : low) = middle;
    }
    return std::max(high, i64(0));
}

// Stage 1

i64 initialize(Parts &p, const i64 *demand, i64 M, i64 theta) {
    std::fill_n(p.load, p.N, 0);
    std::fill_n(p.base, p.N, 0);
    std::fill_n(p.tiles, p.E + p.S, 0);
    i64 total = 0, tokens = 0;
    for (i64 e = 0; e < p.E; ++e) {
        i64 d = demand[e];
        if (d < 0) return -1;
        if (d > MAX_TOKENS - tokens) return -2;
        tokens += d;
        i64 k = portion(1, d + M - 1, M);
        total += k;
        p.base[p.primary[e]] += i32(k);
        i64 whole = p.demand[e];
        if (k <= theta || whole == 0 || p.assign[e] == whole) {
            p.tiles[e] = i32(k);
            p.load[p.primary[e]] += i32(k);
            continue;
        }
        p.tiles[e] = i32(portion(k, p.assign[e], whole));
        i64 home_remainder = k * p.assign[e] - p.tiles[e] * whole;
        i64 left = k - p.tiles[e];
        for (i32 s = p.head[e]; s >= 0; s = p.after[s]) {
            i64 n = portion(k, p.assign[p.E + s], whole);
            p.tiles[p.E + s] = i32(n);
            p.remainder[s] = i32(k * p.assign[p.E + s] - n * whole);
            left -= n;
        }
        for (; left > 0; --left) {
            i32 best = -1;
            i64 most = home_remainder;
            for (i32 s = p.head[e]; s >= 0; s = p.after[s])
                if (p.remainder[s] > most) best = s, most = p.remainder[s];
            if (best < 0) {
                ++p.tiles[e];
                home_remainder = -1;
            } else {
                ++p.tiles[p.E + best];
                p.remainder[best] = -1;
            }
        }
        p.load[p.primary[e]] += p.tiles[e];
        for (i32 s = p.head[e]; s >= 0; s = p.after[s]) p.load[p.owner[s]] += p.tiles[p.E + s];
    }
    if (p.header[MOST_COST] > 1) {
        if (tokens > MAX_TOKENS / p.header[MOST_COST]) return -2;
        for (i64 w = 0; w < p.N; ++w) p.load[w] *= p.cost[w], p.base[w] *= p.cost[w];
    }
    return total;
}

// Stage 2

inline bool behind(const Parts &p, i32 other, i32 t, i32 w) {
    return p.load[other] < t || (p.load[other] == t && other > w);
}

void sort_workers(Parts &p) {
    for (i64 i = 1; i < p.N; ++i) {
        i32 w = p.rank[i], t = p.load[w];
        i64 j = i - 1;
        for (; j >= 0 && behind(p, p.rank[j], t, w); --j) p.rank[j + 1] = p.rank[j];
        p.rank[j + 1] = w;
    }
}

inline i64 to_even(i64 difference, i64 cost_h, i64 cost_c) { return (difference + cost_h - 1) / (cost_h + cost_c); }

void move_load(Parts &p, i64 i, i64 j, i32 q) {
    i32 h = p.rank[i], c = p.rank[j];
    p.load[h] -= q * p.cost[h];
    p.load[c] += q * p.cost[c];
    i32 t = p.load[c];
    for (; j > 0 && behind(p, p.rank[j - 1], t, c); --j) p.rank[j] = p.rank[j - 1];
    p.rank[j] = c;
    if (j == i) ++i;
    t = p.load[h];
    i64 last = p.N - 1;
    for (; i < last; ++i) {
        i32 next = p.rank[i + 1];
        if (!(p.load[next] > t || (p.load[next] == t && next < h))) break;
        p.rank[i] = next;
    }
    p.rank[i] = h;
}

void learn_reach(Parts &p, i64 h, i64 theta) {
    i32 *reach = p.reach + h * p.V;
    std::fill_n(reach, p.V, 0);
    auto add = [&](i64 e) { for (i64 v = 0; v < p.V; ++v) reach[v] |= p.member[e * p.V + v]; };
    for (i64 at = p.homed_from[h]; at < p.homed_from[h + 1]; ++at)
        if (p.tiles[p.homed[at]] > theta) add(p.homed[at]);
    for (i64 s = h * p.R; s < h * p.R + p.R; ++s)
        if (p.tiles[p.E + s] > theta) add(p.slots[s]);
    p.known[h] = 1;
}

i32 move_within(Parts &p, i64 h, i64 c, i32 half) {
    i32 best = -1, most = 0;
    for (i64 s = c * p.R; s < c * p.R + p.R; ++s) {
        i32 e = p.slots[s];
        if (e >= 0 && p.where[e * p.N + h] >= 0) {
            i32 q = std::min(p.tiles[p.where[e * p.N + h]], half);
            if (q > most || (q == most && e < best)) best = e, most = q;
        }
    }
    for (i64 s = h * p.R; s < h * p.R + p.R; ++s) {
        i32 q = std::min(p.tiles[p.E + s], half);
        if (q > 0 && p.primary[p.slots[s]] == c && (q > most || (q == most && p.slots[s] < best)))
            best = p.slots[s], most = q;
    }
    p.tiles[p.where[best * p.N + h]] -= most;
    p.tiles[p.where[best * p.N + c]] += most;
    return most;
}

void rebalance_within(Parts &p, i64 theta) {
    std::fill_n(p.checked, p.N, -1);
    std::fill_n(p.lowered, p.N, 0);
    std::fill_n(p.known, p.N, 0);
    const bool uneven = p.header[MOST_COST] > 1;
    const i64 least = p.header[LEAST_COST];
    i32 moves = 0;
    for (i64 i = 0; i < p.N;) {
        i32 h = p.rank[i];
        i64 spread = p.load[h] - p.load[p.rank[p.N - 1]];
        if ((uneven ? to_even(spread, least, least) : spread / 2) <= theta) return;
        if (!p.known[h]) learn_reach(p, h, theta);
        bool moved = false;
        for (i64 end = p.N; !moved && end > 0;) {
            i32 low = p.load[p.rank[end - 1]];
            i64 difference = p.load[h] - low;
            i64 half = uneven ? to_even(difference, p.cost[h], least) : difference >> 1;
            if (half <= theta) break;
            i64 begin = end - 1;
            while (begin > 0 && p.load[p.rank[begin - 1]] == low) --begin;
            for (i64 j = begin; j < end; ++j) {
                i32 c = p.rank[j];
                if (p.checked[h] < p.lowered[c] && ((p.reach[h * p.V + c / 32] >> (c % 32)) & 1)) {
                    if (uneven) {
                        half = to_even(difference, p.cost[h], p.cost[c]);
                        if (half <= theta) continue;
                    }
                    move_load(p, i, j, move_within(p, h, c, i32(half)));
                    p.lowered[h] = ++moves;
                    p.checked[c] = -1;
                    p.known[h] = p.known[c] = 0;
                    moved = true;
                    break;
                }
            }
            end = begin;
        }
        if (moved) {
            i = 0;
        } else {
            p.checked[h] = moves;
            ++i;
        }
    }
}

// Stage 3

i64 safe_slot(const Parts &p, i64 c, const bool *guarded) {
    i64 best = -1, oldest = -1;
    for (i64 s = c * p.R; s < c * p.R + p.R; ++s) {
        if (p.slots[s] == NO_SUCH_SLOT || guarded[s] || p.reserved[s]) continue;
        if (p.slots[s] == EMPTY) return s;
        if (p.tiles[p.E + s] == 0 && p.age[s] > oldest) best = s, oldest = p.age[s];
    }
    return best;
}

struct Found {
    i64 i, j, s;
    i32 e, q;
};

Found find_beyond(Parts &p, const bool *guarded, i64 theta) {
    const bool uneven = p.header[MOST_COST] > 1;
    const i64 least = p.header[LEAST_COST];
    for (i64 i = 0; i < p.N; ++i) {
        i64 h = p.rank[i];
        i64 spread = p.load[h] - p.load[p.rank[p.N - 1]];
        if ((uneven ? to_even(spread, least, least) : spread / 2) <= theta) break;
        for (i64 end = p.N; end > 0;) {
            i32 low = p.load[p.rank[end - 1]];
            i64 difference = p.load[h] - low;
            i64 half = uneven ? to_even(difference, p.cost[h], least) : difference >> 1;
            if (half <= theta) break;
            i64 begin = end - 1;
            while (begin > 0 && p.load[p.rank[begin - 1]] == low) --begin;
            for (i64 j = begin; j < end; ++j) {
                i64 c = p.rank[j];
                if (p.full[c]) continue;
                if (uneven) {
                    half = to_even(difference, p.cost[h], p.cost[c]);
                    if (half <= theta) continue;
                }
                i64 s = safe_slot(p, c, guarded);
                if (s < 0) {
                    p.full[c] = 1;
                    continue;
                }
                i32 best = -1, most = i32(theta);
                for (i64 at = p.homed_from[h]; at < p.homed_from[h + 1]; ++at) {
                    i32 e = p.homed[at], q = std::min(p.tiles[e], i32(half));
                    if (q > most && p.where[e * p.N + c] < 0) best = e, most = q;
                }
                for (i64 t = h * p.R; t < h * p.R + p.R; ++t) {
                    i32 q = std::min(p.tiles[p.E + t], i32(half));
                    if (q > theta && p.where[p.slots[t] * p.N + c] < 0 && (q > most || (q == most && p.slots[t] < best)))
                        best = p.slots[t], most = q;
                }
                if (best >= 0) return {i, j, s, best, most};
            }
            end = begin;
        }
    }
    return {-1, -1, -1, -1, 0};
}

double rebalance_beyond(Parts &p, const bool *guarded, i64 theta, i64 bound, double tile_us, double copy_us,
                        double window_us) {
    std::fill_n(p.reserved, p.S, 0);
    std::fill_n(p.full, p.N, 0);
    std::fill_n(p.sent, p.N, 0);
    std::fill_n(p.received, p.N, 0);
    p.header[MAX_TILES] = p.load[p.rank[0]];
    double before_us = tile_us * p.load[p.rank[0]], exposed_us = 0.0, best_us = 0.0;
    i32 busiest = 0, made = 0, kept = 0;
    while (made < p.C && (before_us - tile_us * double(bound)) - exposed_us > best_us) {
        Found f = find_beyond(p, guarded, theta);
        if (f.e < 0) break;
        i32 h = p.rank[f.i], c = p.rank[f.j], home = p.primary[f.e], place = p.where[f.e * p.N + h];
        i32 *undo = p.undo + 5 * made, *copy = p.copies + 3 * made;
        undo[0] = f.e, undo[1] = i32(f.s), undo[2] = p.slots[f.s], undo[3] = f.q, undo[4] = place;
        copy[0] = f.e, copy[1] = c, copy[2] = i32(f.s - c * p.R);
        ++made;
        bind(p, f.s, f.e);
        p.reserved[f.s] = 1;
        p.tiles[place] -= f.q;
        p.tiles[p.E + f.s] = f.q;
        p.full[h] = 0;
        move_load(p, f.i, f.j, f.q);
        busiest = std::max({busiest, ++p.sent[home], ++p.received[c]});
        exposed_us = std::max(0.0, copy_us * busiest - window_us);
        double gain_us = (before_us - tile_us * p.load[p.rank[0]]) - exposed_us;
        if (gain_us > best_us) {
            best_us = gain_us;
            kept = made;
            p.header[MAX_TILES] = p.load[p.rank[0]];
        }
    }
    p.header[TRIED] = made;
    while (made > kept) {
        const i32 *undo = p.undo + 5 * --made;
        i64 s = undo[1];
        p.tiles[undo[4]] += undo[3];
        p.tiles[p.E + s] = 0;
        p.reserved[s] = 0;
        bind(p, s, undo[2]);
    }
    p.header[COPIES] = kept;
    return best_us;
}

void record(Parts &p, const i64 *demand, i64 M) {
    i32 *share = p.shares;
    for (i64 e = 0; e < p.E; ++e) {
        i64 left = demand[e];
        p.demand[e] = i32(left);
        i64 last = -1;
        for (i32 s = p.head[e]; s >= 0; s = p.after[s]) {
            i64 n = p.tiles[p.E + s] * M;
            p.assign[p.E + s] = i32(n);
            if (n > 0) {
                share[0] = i32(e), share[1] = p.owner[s], share[2] = i32(s - p.owner[s] * p.R), share[3] = i32(n);
                share += 4;
                last = s;
                left -= n;
            }
        }
        if (left < 0) {
            p.assign[p.E + last] += i32(left);
            share[-1] += i32(left);
            left = 0;
        }
        p.assign[e] = i32(left);
    }
    p.header[SHARES] = i32((share - p.shares) / 4);
    for (i64 s = 0; s < p.S; ++s) {
        bool working = p.tiles[p.E + s] > 0 || p.reserved[s];
        p.used[s] = working;
        if (working) p.age[s] = 0;
        else if (p.age[s] < MAX_AGE) ++p.age[s];
    }
}

}  // namespace

// What every core is called as, with the lengths of its arrays; `scratch` is for those that need some.
extern "C" double plan(i32 *buffer, i64, i32 *, i64, const i64 *demand, i64, const bool *guarded, i64, double tile_us,
                       double copy_us, double window_us) {
    Parts p(buffer);
    i64 M = p.header[TILE_TOKENS], theta = threshold(p, demand, M);
    i64 total = initialize(p, demand, M, theta);
    if (total < 0) return double(total);
    p.header[TOTAL_TILES] = i32(total);
    p.header[BASE_MAX_TILES] = *std::max_element(p.base, p.base + p.N);
    sort_workers(p);
    rebalance_within(p, theta);
    p.header[WITHIN_MAX_TILES] = p.load[p.rank[0]];
    i64 bound = least_load(p, total);
    p.header[BOUND_TILES] = i32(bound);
    double load_us = tile_us / p.header[LEAST_COST];
    double gain_us = rebalance_beyond(p, guarded, theta, bound, load_us, copy_us, window_us);
    record(p, demand, M);
    return gain_us;
}

using Core = double (*)(i32 *, i64, i32 *, i64, const i64 *, i64, const bool *, i64, double, double, double);

// Plans `count` targets of demand [count, E] one after the other, each on the state that the last one left, with the slots of
// the last plan guarded (two microbatches in flight); writes each call's nanoseconds, its most loaded worker and all its tiles.
extern "C" void drive(Core core, i32 *buffer, i64 buffer_words, i32 *scratch, i64 scratch_words, const i64 *demand, i64 count,
                      bool *guarded, double tile_us, double copy_us, double window_us, i64 *nanoseconds, i64 *max_tiles,
                      i64 *total_tiles) {
    Parts p(buffer);
    for (i64 t = 0; t < count; ++t) {
        timespec before, after;
        clock_gettime(CLOCK_MONOTONIC, &before);
        core(buffer, buffer_words, scratch, scratch_words, demand + t * p.E, p.E, guarded, p.S, tile_us, copy_us, window_us);
        clock_gettime(CLOCK_MONOTONIC, &after);
        nanoseconds[t] = (after.tv_sec - before.tv_sec) * 1000000000LL + (after.tv_nsec - before.tv_nsec);
        max_tiles[t] = p.header[MAX_TILES];
        total_tiles[t] = p.header[TOTAL_TILES];
        for (i64 s = 0; s < p.S; ++s) guarded[s] = p.used[s] != 0;
    }
}
