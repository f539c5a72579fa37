"""A small language model token by token, with a cache of keys and values of a fixed size, batch 1.

    python -m bench.decoding [--threads N] [--layers N] [--hidden N] [--tokens N] [--rounds N] [--no-inductor]

As llama: RMS norms, rotary positions, grouped queries, gated layers; random weights, in float32 and as integers of 8
bits with a scale for each column. The position is a tensor, so that one graph serves all tokens; ferrite is given the
model as it is, and frozen. Each token reads all weights once: `of bandwidth` is the time that takes at the speed at
which this machine reads memory, measured in the same run, to the time of a token. Above 1 is not possible but where
weights stay in caches. Every compiler's tokens are compared with eager's before anything is timed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

import ferrite
from bench.backends import EAGER, INDUCTOR, OURS, backends, given_to
from bench.measure import interleaved, write
from bench.rivals import FROZEN, difference

HEAD, GROUP, VOCABULARY = 64, 4, 8192  # elements of a head, heads that share keys
READ_BYTES = 1 << 28


class Dense(torch.nn.Module):
    """A layer without a bias; `is_short`: of integers of 8 bits, with a scale for each column."""

    def __init__(self, inner: int, columns: int, is_short: bool) -> None:
        super().__init__()
        weight = torch.randn(columns, inner) / inner**0.5
        self.is_short = is_short
        if is_short:
            scale = weight.abs().amax(1) / 127
            self.register_buffer("scale", scale)
            weight = (weight / scale[:, None]).round().to(torch.int8)
        self.register_buffer("weight", weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_short:
            return F.linear(x, self.weight)
        return F.linear(x, self.weight.to(x.dtype)) * self.scale


class Block(torch.nn.Module):
    def __init__(self, hidden: int, length: int, is_short: bool) -> None:
        super().__init__()
        self.heads, self.shared = hidden // HEAD, hidden // HEAD // GROUP
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(hidden) for _ in range(2))
        self.query = Dense(hidden, hidden, is_short)
        self.key, self.value = (Dense(hidden, self.shared * HEAD, is_short) for _ in range(2))
        self.out = Dense(hidden, hidden, is_short)
        self.gate, self.up = (Dense(hidden, 3 * hidden, is_short) for _ in range(2))
        self.down = Dense(3 * hidden, hidden, is_short)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, self.shared, length, HEAD))

    def forward(self, x: torch.Tensor, place: torch.Tensor, turn: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        query = turned(self.query(y).view(1, 1, self.heads, HEAD).transpose(1, 2), turn)
        key = turned(self.key(y).view(1, 1, self.shared, HEAD).transpose(1, 2), turn)
        value = self.value(y).view(1, 1, self.shared, HEAD).transpose(1, 2)
        self.keys.index_copy_(2, place, key)
        self.values.index_copy_(2, place, value)
        found = F.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=seen, enable_gqa=True)
        x = x + self.out(found.transpose(1, 2).reshape(1, 1, -1))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotary positions: halves of a head are turned by the angles of the place."""
    near, far = x.chunk(2, -1)
    return x * turn.cos() + torch.cat([-far, near], -1) * turn.sin()


class Decoder(torch.nn.Module):
    """The most likely token after one at a place, of which all before are in the cache."""

    def __init__(self, layers: int, hidden: int, length: int, is_short: bool) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, hidden)
        self.blocks = torch.nn.ModuleList(Block(hidden, length, is_short) for _ in range(layers))
        self.norm, self.head = torch.nn.RMSNorm(hidden), Dense(hidden, VOCABULARY, is_short)
        self.register_buffer("angles", 10_000 ** (-torch.arange(0, HEAD, 2) / HEAD).repeat(2))
        self.register_buffer("places", torch.arange(length))

    def forward(self, token: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        x = self.embedding(token)[None]
        turn, seen = place * self.angles, (self.places <= place)[None, None, None]
        for block in self.blocks:
            x = block(x, place, turn, seen)
        return self.head(self.norm(x))[0, 0]

    @property
    def bytes_read(self) -> int:
        """By each token: all weights of layers."""
        return sum(item.weight.nbytes for item in self.modules() if isinstance(item, Dense))


# --- measuring --------------------------------------------------------------------------------------------------------


def run_of(model: Decoder, backend: str, tokens: int) -> Callable[[], torch.Tensor]:
    """What decodes so many tokens, from an empty cache; it gives out what was said of the next one each time."""
    step: Callable[..., torch.Tensor]
    step = ferrite.freeze(model, dynamic=False) if backend == FROZEN else given_to(backend, model)

    def run() -> torch.Tensor:
        found, token = [], torch.tensor([1])
        with torch.no_grad():
            for place in range(tokens):
                found.append(step(token, torch.tensor([place])).clone())
                token = (token * 31 + 7) % VOCABULARY  # the same for all, however close two tokens may be
        return torch.stack(found)

    return run


def bytes_per_second(rounds: int) -> float:
    """At which torch, with all its threads, reads memory that no cache holds."""
    data = torch.ones(READ_BYTES // 4)
    return READ_BYTES / min(interleaved({"read": data.sum}, rounds)["read"])


def rows_of(model: Decoder, kind: str, names: Sequence[str], chosen: Any, speed: float) -> list[str]:
    calls, lines = {}, []
    exact = run_of(model, EAGER, chosen.tokens)()
    for name in names:
        torch.compiler.reset()
        call = run_of(model, name, chosen.tokens)
        problem = difference(call(), exact)
        if problem is None:
            calls[name] = call
        else:
            lines.append(f"| {kind} | {name} | {problem} | | |")
    seconds = interleaved(calls, chosen.rounds)
    for name in calls:
        token = statistics.median(seconds[name]) / chosen.tokens
        to_eager = statistics.median(seconds[EAGER]) / chosen.tokens / token
        share = model.bytes_read / speed / token
        lines.append(f"| {kind} | {name} | {1e3 * token:.2f} | {to_eager:.2f} | {share:.2f} |")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--length", type=int, default=256, help="places of the cache")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--write", action="store_true", help="keep the page in bench/results")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    speed = bytes_per_second(chosen.rounds)
    names = [EAGER, OURS, FROZEN, *(name for name in backends(not chosen.no_inductor) if name == INDUCTOR)]
    lines = ["| weights | | ms for a token | times eager | of bandwidth |", "|---|---|---|---|---|"]
    for kind in ("float32", "int8"):
        model = Decoder(chosen.layers, chosen.hidden, chosen.length, kind == "int8").eval()
        lines += rows_of(model, kind, names, chosen, speed)
    lines += ["", f"Memory is read at {speed / 1e9:.1f} GB/s."]
    if chosen.write:
        write("decoding", f"A language model token by token, threads: {chosen.threads}", lines)
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
