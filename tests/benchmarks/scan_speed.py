"""Time and memory of our selective scan beside transformers' and mambapy's, forward and backward, on one thread.

Every measurement runs in a process of its own; memory is how far the process's peak grew beyond its inputs, in all
and by position and sequence.
"""

import json
import resource
import subprocess
import sys
import time

import torch

D_INNER, D_STATE = 256, 16
CASES = {40: 64, 93: 64, 256: 64, 1024: 4}
"""Length -> batch."""
METHODS = ("ours", "mambapy", "transformers")
GOAL = 5.0


def scan_of(method):
    """A function of x, dt (batch pos d_inner), A (d_inner d_state), B and C (batch pos d_state)."""
    if method == "ours":
        from interp.models.selective_scan import selective_scan

        return selective_scan
    if method == "mambapy":
        from mambapy.mamba import MambaBlock

        return lambda x, dt, A, B, C: MambaBlock.selective_scan(None, x, dt, A, B, C, torch.zeros(D_INNER))
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    return lambda x, dt, A, B, C: mamba_selective_scan(x.mT, dt.mT, A, B.mT, C.mT).mT


def inputs(length, batch):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, length, D_INNER, generator=generator)
    dt = 0.1 * torch.rand(batch, length, D_INNER, generator=generator)
    A = -torch.arange(1.0, D_STATE + 1).repeat(D_INNER, 1)
    B, C = (torch.randn(batch, length, D_STATE, generator=generator) for _ in range(2))
    return [t.requires_grad_() for t in (x, dt, A, B, C)]


def peak_bytes():
    """The process's peak resident memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def measure(method, length):
    """Seconds forward, seconds forward and backward, peak bytes, and a checksum of the results."""
    torch.set_num_threads(1)
    scan = scan_of(method)
    small, tensors = inputs(8, 1), inputs(length, CASES[length])
    torch.autograd.grad(scan(*small).sum(), small)
    before, seconds = peak_bytes(), []
    while not seconds or (len(seconds) < 5 and sum(total for _, total in seconds) < 10):
        start = time.perf_counter()
        y = scan(*tensors)
        middle = time.perf_counter()
        gradients = torch.autograd.grad(y.sum(), tensors)
        seconds.append((middle - start, time.perf_counter() - start))
    forward, total = min(seconds, key=lambda pair: pair[1])
    checks = [t.detach().double().square().mean().sqrt().item() for t in (y, *gradients)]
    return {"forward": forward, "total": total, "bytes": peak_bytes() - before, "checks": checks}


def main():
    fastest = []
    print(f"d_inner {D_INNER}, d_state {D_STATE}, one thread; memory beyond the inputs")
    print(f"{'length':>6} {'batch':>5}  {'method':<13}{'forward':>10}{'+ backward':>12}{'memory':>11}{'each':>10}")
    for length, batch in CASES.items():
        found = {}
        for method in METHODS:
            command = [sys.executable, __file__, method, str(length)]
            found[method] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            row = found[method]
            for ours, theirs in zip(found["ours"]["checks"], row["checks"], strict=True):
                assert abs(ours - theirs) < 1e-4 * theirs, f"{method} computes something else"
            print(
                f"{length:6d} {batch:5d}  {method:<13}{1e3 * row['forward']:7.0f} ms{1e3 * row['total']:9.0f} ms"
                f"{row['bytes'] / 2**20:7.0f} MiB{row['bytes'] / length / batch / 2**10:6.0f} KiB",
                flush=True,
            )
        others = [found[method] for method in METHODS[1:]]
        faster = min(row["total"] for row in others) / found["ours"]["total"]
        smaller = min(row["bytes"] for row in others) / found["ours"]["bytes"]
        fastest.append(faster)
        print(f"{'':14}ours: {faster:.1f} times faster than the faster, {smaller:.1f} times less memory", flush=True)
    verdict = "met" if min(fastest) >= GOAL else "MISSED"
    print(f"at least {min(fastest):.1f} times faster at every length; goal {GOAL:.0f}: {verdict}")
    sys.exit(min(fastest) < GOAL)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
    else:
        main()
