"""``python -m afore.tools.train_tiny``: trains a small real MoE model on your texts, in an hour of one core or less.

What comes out is a Glm4Moe checkpoint (weights, tokenizer, chat template) that ``--model`` takes. Its point is routing that
was learned, and is skewed and different by domain, as that of large models is.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from afore.core.errors import AforeError, CheckpointError, ConfigError, HostError
from afore.models.checkpoint import Checkpoint
from afore.models.loading import verify_checkpoint
from afore.models.quiet import no_progress_bar
from afore.tools.ending import end_with
from afore.tools.train_corpus import read_domains, save_tokenizer, tokenize, train_tokenizer
from afore.tools.train_loop import (
    StepReport,
    TrainOptions,
    held_out_losses,
    new_model,
    round_weights,
    train,
)

EPILOG = """\
TEXT is FILE or NAME=FILE, NAME being the domain (the file's name otherwise); several files may share a domain. A .jsonl file
has one JSON object a line, with text, prompt/response or question/answer; any other file is plain text. Every domain gets an
equal share.

examples:
  python -m afore.tools.train_tiny math=gsm8k.jsonl chat=chat.jsonl code=code.txt web=web.txt --out my-model
  python -m afore.tools.train_tiny book.txt --out my-model --minutes 5 --experts 32 --top-k 4
  python -m afore.launch --model my-model --prompt "Once"

Ctrl-C ends training early and saves what was learnt.
exit status: 0 saved, 1 training failed, 2 the texts or the output directory cannot be used
"""

REPORT_FILE = "training.json"
_LOG_SHARE = 0.05
"""Without a terminal there is no bar: a line each time this share of the training is done."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    options = _parser().parse_args(argv)
    try:
        _run(options, Console(stderr=True, highlight=False))
    except (ConfigError, HostError, CheckpointError) as error:
        print(f"train_tiny: {error}", file=sys.stderr)
        return 2
    except AforeError as error:
        print(f"train_tiny: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m afore.tools.train_tiny",
        description="Trains a small Glm4Moe model with auxiliary-loss-free balancing on your texts.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="FILE or NAME=FILE, text or .jsonl")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="where the checkpoint goes; new or empty"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--steps", type=_positive, help="training steps (default 4500); the same seed repeats them exactly"
    )
    length.add_argument("--minutes", type=float, help="or minutes of processor time, whatever steps they hold")
    model = parser.add_argument_group("model")
    for name, default, what in _MODEL_OPTIONS:
        model.add_argument(name, type=_positive, default=default, help=f"{what} (default {default})")
    training = parser.add_argument_group("training")
    training.add_argument("--batch", type=_positive, default=16, help="windows a step (default 16)")
    training.add_argument("--window", type=_positive, default=256, help="tokens of a window (default 256)")
    training.add_argument("--learning-rate", type=float, default=3e-3, help="peak (default 3e-3)")
    training.add_argument("--bias-step", type=float, default=0.01, help="balancing step, decayed (default 0.01)")
    training.add_argument("--seed", type=int, default=0, help="of weights, windows and document order (default 0)")
    training.add_argument("--threads", type=_positive, default=1, help="torch threads (default 1)")
    training.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the saved weights")
    return parser


_MODEL_OPTIONS = (
    ("--vocab", 4096, "tokens of the vocabulary, at most"),
    ("--layers", 4, "decoder layers, the first one dense"),
    ("--hidden", 128, "hidden size"),
    ("--heads", 4, "attention heads"),
    ("--kv-heads", 2, "key/value heads"),
    ("--experts", 128, "routed experts of a layer"),
    ("--top-k", 8, "experts per token"),
    ("--expert-hidden", 32, "hidden size of an expert"),
    ("--dense-hidden", 512, "hidden size of the dense layer"),
    ("--max-positions", 2048, "longest sequence that the checkpoint says it takes"),
)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def _run(options: argparse.Namespace, console: Console) -> None:
    _check(options)
    texts = read_domains(options.texts)
    torch.set_num_threads(options.threads)
    tokenizer = train_tokenizer((text for documents in texts.values() for text in documents), options.vocab)
    domains = tokenize(texts, tokenizer, window=options.window, seed=options.seed)
    _prepare(options.out)
    model = new_model(_model_config(options, tokenizer.get_vocab_size()), options.seed)
    for domain in domains:
        console.print(f"{domain.name}: {len(domain.train_n):,} tokens, {len(domain.held_out_n):,} more held out")
    console.print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
    settings = TrainOptions(
        batch=options.batch,
        window=options.window,
        learning_rate=options.learning_rate,
        bias_step=options.bias_step,
        seed=options.seed,
    )
    last: list[StepReport] = []
    told = [0.0]
    with _bar(console) as bar:
        shown = bar.add_task("training", total=1.0, loss="", balance="")
        progress = _progress(options)

        def report(step: StepReport) -> None:
            last[:] = [step]
            done = progress(step.step + 1)
            _show(bar, shown, step, done)
            if not console.is_terminal and done >= told[0]:
                console.print(f"{min(done, 1.0):.0%}: step {step.step + 1}, loss {step.loss:.3f}")
                told[0] = done + _LOG_SHARE

        steps = train(model, domains, settings, progress, report)
    if steps == 0:
        raise ConfigError("minutes", "ended before the first step", "give it longer")
    round_weights(model, getattr(torch, options.dtype))
    with no_progress_bar():
        model.save_pretrained(str(options.out))
    save_tokenizer(tokenizer, options.out, options.max_positions)
    losses = held_out_losses(model.float(), domains, options.window)
    _report(options, steps, losses, last[0], console)
    with Checkpoint(options.out) as checkpoint:
        verify_checkpoint(checkpoint)
    console.print(f"saved: python -m afore.launch --model {options.out}")


def _check(options: argparse.Namespace) -> None:
    if options.minutes is not None and not options.minutes > 0:
        raise ConfigError("minutes", f"{options.minutes} is not above 0", "give minutes of processor time")
    if not options.learning_rate > 0:
        raise ConfigError("learning-rate", f"{options.learning_rate} is not above 0", "3e-3 suits the default model")
    if options.top_k > options.experts:
        raise ConfigError("top-k", f"{options.top_k} of {options.experts} experts", "give at most as many as experts")
    if options.experts < 2:
        raise ConfigError("experts", "one expert needs no routing", "give at least 2")
    if options.layers < 2:
        raise ConfigError("layers", "the first layer is dense, so one layer routes nothing", "give at least 2")
    if options.heads % options.kv_heads or options.hidden % options.heads or (options.hidden // options.heads) % 4:
        raise ConfigError(
            "heads",
            f"{options.heads} heads, {options.kv_heads} key/value heads and hidden size {options.hidden} do not divide",
            "hidden / heads must be a multiple of 4, heads a multiple of kv-heads",
        )
    if options.window >= options.max_positions:
        raise ConfigError(
            "window", f"{options.window} does not fit --max-positions {options.max_positions}", "lower it"
        )
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise ConfigError("out", f"{options.out} is not an empty directory", "give a new one")


def _prepare(directory: Path) -> None:
    """Before an hour of training rather than after it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / REPORT_FILE).touch()
    except OSError as error:
        raise HostError(str(directory), f"cannot be written ({error.strerror})", "give another --out") from error


def _model_config(options: argparse.Namespace, vocab_size: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": options.hidden,
        "intermediate_size": options.dense_hidden,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "head_dim": options.hidden // options.heads,
        "max_position_embeddings": options.max_positions,
        "moe_intermediate_size": options.expert_hidden,
        "n_routed_experts": options.experts,
        "num_experts_per_tok": options.top_k,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    }


def _progress(options: argparse.Namespace) -> Callable[[int], float]:
    """Share of the training that is done before a step; it also sets the learning rate."""
    if options.minutes is None:
        total = options.steps or 4500
        return lambda step: step / total
    started = time.process_time()
    return lambda step: (time.process_time() - started) / (60.0 * options.minutes)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[balance]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def _show(bar: Progress, task: TaskID, step: StepReport, done: float) -> None:
    balance = " ".join(f"{ratio:.1f}" for ratio in step.balance)
    bar.update(task, completed=min(done, 1.0), loss=f"loss {step.loss:.3f}", balance=f"max/mean {balance}")


def _report(
    options: argparse.Namespace, steps: int, losses: dict[str, float], last: StepReport, console: Console
) -> None:
    table = Table("domain", "held-out loss, nats per token", title=f"after {steps} steps")
    for name, loss in losses.items():
        table.add_row(name, f"{loss:.3f}")
    console.print(table)
    console.print("max/mean tokens per expert in the last step: " + " ".join(f"{ratio:.2f}" for ratio in last.balance))
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    record = {"steps": steps, "held_out_loss": losses, "last_loss": last.loss, "balance": last.balance} | {
        "options": settings
    }
    (options.out / REPORT_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    end_with(main)
