"""Digests of what `mmdgs sample`, `restore` and `posterior` write, by sampler and covariance.

Two states of the code that should draw the same numbers are compared by

    python tests/same_bytes.py --out before.json       # with the sources of the one
    python tests/same_bytes.py --against before.json   # with those of the other

Pixels and arrays are compared, not the files that hold them, nor records and pages.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.numpy import load_file

NEEDS_NO_FIT = ("diagonal", "rademacher", "lattice", "krylov --krylov-steps 3")
FITTED = ("isotropic", "spectral", "low-rank", "modulated")
ONE_LEVEL = (*NEEDS_NO_FIT, "isotropic", "diagonal --probes 2 --floor 1e-6")
MANY_LEVELS = (
    *NEEDS_NO_FIT,
    *FITTED,
    "low-rank --products 1 --symmetric",
    "spectral --uncalibrated",
)
SAMPLERS = (
    *(
        f"{sampler} --steps 4"
        for sampler in (
            "langevin --sweeps 2", "consistent", "consistent --eta 0.99", "ddim", "ddim --eta 1",
            "heun", "heun --churn 0.3", "heun --clip", "multistep", "multistep --order 3 --eta 1",
            "multistep --guide cifar10 --guidance 1.5", "ancestral", "ancestral --covariance large",
            "ancestral --covariance spectral", "ancestral --covariance diagonal --last-noise 1",
            "gibbs-down --covariance spectral",
        )
    ),
    "heun --levels geometric:4:20:0.02",
)  # fmt: skip
TRAINED = "train --data mog --model mlp --param score --sigma 0.5 --steps 20 --batch-size 64"
CHAINS = ("multistep", "bridge", "mirrored")
RESTORED = ("spectral", "isotropic", "diagonal", "krylov", "low-rank", "modulated")
OPERATORS = ("sr:4", "box:16", "random:0.8", "blur:1.5")


def commands() -> list[str]:
    """The commands, without what they have in common."""
    chains = "-n 2 --steps 2"
    gibbs = f"sample cifar10 {chains} --sampler gibbs --sweeps 1 --covariance"
    restore = "restore cifar10 IMAGE --simulate --draws 2 --steps 3"
    posterior = "posterior cifar10 IMAGE --sigma 0.2 --draws 2"
    return [
        TRAINED,
        *(f"sample mnist {chains} --covariance {covariance}" for covariance in ONE_LEVEL),
        f"sample mnist {chains} --mean",
        f"sample POINTS {chains} --covariance full",
        f"sample mnist-kl {chains}",
        *(f"{gibbs} {covariance}" for covariance in MANY_LEVELS),
        *(f"sample cifar10 -n 2 --sampler {sampler}" for sampler in SAMPLERS),
        "sample celeba -n 1 --steps 2",
        *(f"{restore} --operator sr:4 --noise 0.05 --covariance {name}" for name in RESTORED),
        *(f"{restore} --operator sr:4 --noise 0.05 --chains {name}" for name in CHAINS),
        *(f"{restore} --operator {operator} --noise 0.05" for operator in OPERATORS),
        f"{restore} --operator random:0 --noise estimate".replace(" --simulate", ""),
        f"{posterior} --components 2 --krylov-steps 4",
        f"{posterior} --components 0 --krylov-steps 4 --uncalibrated",
        f"{posterior} --components 1 --krylov-steps 2 --simulate --region 4,4,8,8",
        "posterior mnist DIGIT --sigma 0.5 --components 2 --draws 2 --krylov-steps 4",
    ]


def digest(folder: Path) -> dict[str, str]:
    """The digest of each array and picture below a folder, by its path."""
    digests = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        arrays: dict[str, np.ndarray] = {}
        if path.suffix == ".npz":
            with np.load(path) as file:
                arrays = {name: file[name] for name in file.files}
        elif path.suffix in (".npy", ".png"):
            arrays = {"": np.load(path) if path.suffix == ".npy" else np.asarray(Image.open(path))}
        elif path.name == "model.safetensors":
            arrays = load_file(path)
        for name, array in arrays.items():
            text = f"{array.dtype} {array.shape} ".encode() + np.ascontiguousarray(array).tobytes()
            key = f"{path.relative_to(folder)} {name}".strip()
            digests[key] = hashlib.sha256(text).hexdigest()[:16]
    return digests


def inputs(folder: Path) -> dict[str, str]:
    """Files that commands take, by the words that stand for them."""
    rng = np.random.default_rng(0)
    arrays = {
        "IMAGE": rng.random((8, 8, 3)).repeat(4, 0).repeat(4, 1),
        "DIGIT": rng.random((7, 7)).repeat(4, 0).repeat(4, 1),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name.lower()}.npy", array.astype(np.float32))
    return {name: str(folder / f"{name.lower()}.npy") for name in arrays} | {
        "POINTS": str(folder / "points")
    }


def run(command: str, folder: Path, words: dict[str, str]) -> dict[str, str] | str:
    """The digests of what a command wrote, or the error it ended with; it runs in this process."""
    from mmdgs.cli import app

    out = folder / "samples.npz" if command.startswith("sample") else folder
    arguments = [words.get(word, word) for word in shlex.split(command)]
    arguments += ["--out", str(out), "--device", "cpu", "--seed", "3", "--quiet", "--debug"]
    arguments += ["--float"] if command.startswith("sample") else []
    try:
        app(arguments, standalone_mode=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return digest(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the digests to this file")
    parser.add_argument("--against", type=Path, help="compare with the digests of this file")
    parser.add_argument("--only", default="", help="commands that contain this text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = json.loads(options.against.read_text()) if options.against else {}
    digests: dict[str, dict[str, str] | str] = {}
    differing = []
    with tempfile.TemporaryDirectory() as name:
        words = inputs(Path(name))
        for number, command in enumerate(commands()):
            if options.only not in command and command != TRAINED:
                continue
            started = time.perf_counter()
            folder = Path(words["POINTS"] if command == TRAINED else f"{name}/{number}")
            folder.mkdir()
            digests[command] = run(command, folder, words)
            same = not options.against or before.get(command) == digests[command]
            if not same:
                differing.append(command)
            seconds = time.perf_counter() - started
            print(f"{'' if same else 'DIFFERS '}{command} ({seconds:.1f} s)", flush=True)
            if not same or isinstance(digests[command], str):
                print(f"    {digests[command]}\n    before: {before.get(command)}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(digests, indent=1))
    print(f"{len(digests)} commands, {len(differing)} differ")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
