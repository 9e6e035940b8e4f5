"""A client that has nothing but the standard library."""

from __future__ import annotations

import json
import sys
import urllib.request


def ask_url(url: str, prompt: str, count: int) -> str:
    """The greedy answer of the server at ``url``, of at most ``count`` tokens."""
    with urllib.request.urlopen(url + "/v1/models", timeout=60) as reply:
        model = json.load(reply)["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": count, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=240) as reply:
        text: str = json.load(reply)["choices"][0]["text"]
    return text


if __name__ == "__main__":
    sys.stdout.write(ask_url(sys.argv[1], sys.argv[2], int(sys.argv[3])))
