"""Peak memory of 1,000 prompts through SmolLM2, keys and residual stream of all layers, streamed to disk.

Prompts are of 24 to 40 random tokens, padded; nothing of the twin. The peak is that of the whole process, with the
interpreter, the libraries and the weights.
"""

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from interp.pretrained import PADDING, load_pretrained
from probes import extract

GOAL = 4.0


def prompts(count, d_vocab):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, d_vocab, (count, 40), generator=generator)
    length = torch.randint(24, 41, (count, 1), generator=generator)
    return SimpleNamespace(tokens=tokens.masked_fill(torch.arange(40) >= length, PADDING), position=length - 1)


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--folder", type=Path, help="where activations are kept; by default nowhere")
    options = parser.parse_args()
    model = load_pretrained("smollm2")
    batch = prompts(options.prompts, model.cfg.d_vocab)
    print(
        f"{options.prompts} prompts, {int((batch.tokens >= 0).sum()):,} tokens; with the model loaded: {peak():.2f} GiB"
    )
    with tempfile.TemporaryDirectory() as temporary:
        start = time.perf_counter()
        acts = extract(model, batch, ["k", "resid_post"], twin_seed=None, to=options.folder or temporary)
        written = sum(tensor.nbytes for tensor in (*acts.values(), acts.logits)) / 2**30
        print(f"{len(acts)} hooks, {written:.2f} GiB on disk in {time.perf_counter() - start:.0f} s")
        verdict = "met" if peak() < GOAL else "MISSED"
        print(f"peak {peak():.2f} GiB; goal below {GOAL:.0f}: {verdict}")
    sys.exit(peak() >= GOAL)


if __name__ == "__main__":
    main()
