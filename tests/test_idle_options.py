"""No option is ignored: each one of each command changes what is written or printed, or is refused in one line."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from toy_models import stand_in_model
from typer.main import get_command
from typer.testing import CliRunner

from mmdgs.cli import app

EXEMPT = {
    "debug": "shows a traceback of errors",
    "quiet": "shows no progress",
    "device": "results are the same on all",
    "out": "where results go",
    "overwrite": "what was there before",
    "resume": "what was there before",
    "help": "shows the help",
}
TIMES = ("seconds", "minutes", "examples_a_second")
SETTLED = (".npz", ".npy", ".png", ".safetensors", ".json", ".jsonl", ".yaml")
"""Files without times in them, but for JSON's under their names."""


@dataclass(frozen=True)
class Case:
    """A command with its arguments, and for each option what to add to them, or why none is tried (a text)."""

    words: Callable[[Path], list[str]]
    options: dict[str, list[str] | str]
    file: str | None = "out"  # what --out is, if there is one

    def to(self, folder: Path) -> list[str]:
        return [] if self.file is None else ["--out", str(folder / self.file)]


def images(folder: Path, shape: tuple[int, ...] = (4, 16, 16, 3)) -> str:
    file = folder / f"images{shape[0]}.npz"
    pixels = torch.randint(256, shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]))
    np.savez(file, arr_0=pixels.to(torch.uint8).numpy())
    return str(file)


def picture_folder(folder: Path) -> str:
    made = folder / "pictures"
    made.mkdir(exist_ok=True)
    pixels = torch.randint(256, (8, 12, 12, 3), generator=torch.Generator().manual_seed(0)).to(torch.uint8).numpy()
    for i, one in enumerate(pixels):
        Image.fromarray(one).save(made / f"{i}.png")
    return str(made)


def model(folder: Path) -> str:
    if not (folder / "model").exists():
        stand_in_model(folder / "model", (3, 16, 16))
    return str(folder / "model")


def arrays(folder: Path, name: str, **given: tuple[int, ...]) -> str:
    generator = torch.Generator().manual_seed(0)
    np.savez(folder / name, **{key: torch.randn(shape, generator=generator).numpy() for key, shape in given.items()})
    return str(folder / name)


def written(folder: Path, name: str, content: str) -> str:
    (folder / name).write_text(content)
    return str(folder / name)


SAMPLER = """
import torch
def sample(problem, draws, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(draws, problem.cases, problem.dim, generator=generator, dtype=problem.y.dtype)
"""
METHOD: dict[str, list[str] | str] = {
    "sampler": ["--sampler", "ddim"], "levels": ["--levels", "geometric:3:4:0.2"], "steps": ["--steps", "4"],
    "covariance": ["--covariance", "isotropic"], "head": ["--head", "nowhere"], "sweeps": ["--sweeps", "2"],
    "probes": ["--probes", "2"], "products": ["--products", "1"], "products_below": ["--products-below", "1"],
    "krylov_steps": ["--krylov-steps", "2"], "most_products": ["--most-products", "5"], "symmetric": ["--symmetric"],
    "floor": ["--floor", "0.1"], "rate": ["--rate", "0.1"], "eta": ["--eta", "0.5"], "churn": ["--churn", "0.3"],
    "order": ["--order", "3"], "guide": ["--guide", "nowhere"], "guidance": ["--guidance", "1.5"], "clip": ["--clip"],
    "last_noise": ["--last-noise", "1"], "calibrated": ["--uncalibrated"], "mean": ["--mean"],
}  # fmt: skip
CASES = {
    "sample": Case(
        lambda folder: [model(folder), "-n", "2", "--steps", "3"],
        METHOD | {
            "n": ["-n", "3"], "data": ["--data", "mnist"], "data_dir": ["--data-dir", "."], "size": ["--size", "8"],
            "fit_images": ["--fit-images", "2"], "floating": ["--float"], "chain_every": ["--chain-every", "1"],
            "batch_size": "as many samples in other parts", "raw": ["--raw"], "precision": ["--precision", "bf16"],
            "fast": "acts on a GPU", "seed": ["--seed", "1"],
        },
        "out.npz",
    ),
    "sample of probes": Case(
        lambda folder: [model(folder), "-n", "2", "--steps", "2", "--probes", "1"],
        METHOD | {"steps": ["--steps", "3"], "n": "above", "data": "above", "data_dir": "above", "size": "above",
            "fit_images": "above", "floating": "above", "chain_every": "above", "batch_size": "above", "raw": "above",
            "precision": "above", "fast": "above", "seed": "above"},
        "out.npz",
    ),
    "restore": Case(
        lambda folder: [model(folder), images(folder), "--operator", "sr:2", "--noise", "0.1", "--simulate", "-n", "1",
                        "--draws", "2", "--steps", "2"],
        {
            "operator": ["--operator", "gray"], "noise": ["--noise", "0.2"], "simulate": "refused without it: sizes",
            "n": ["-n", "2"], "draws": ["--draws", "3"], "steps": ["--steps", "3"], "seed": ["--seed", "1"],
            "covariance": ["--covariance", "krylov"], "chains": ["--chains", "bridge"], "data_dir": ["--data-dir", "."],
            "batch_size": "as many draws in other parts", "precision": ["--precision", "bf16"],
            "products": ["--products", "1"], "symmetric": ["--symmetric"], "calibrated": ["--uncalibrated"],
        },
    ),
    "posterior": Case(
        lambda folder: [model(folder), images(folder), "--sigma", "0.5", "-n", "1", "--components", "0", "--draws",
                        "0"],
        {
            "sigma": ["--sigma", "0.4"], "simulate": ["--simulate"], "components": ["--components", "1"],
            "draws": ["--draws", "1"], "region": ["--region", "0,0,4,4"], "calibrate": ["--calibrate", "nowhere"],
            "calibration_images": ["--calibration-images", "20"], "n": ["-n", "2"], "tolerance": ["--tolerance", "0.1"],
            "krylov_steps": ["--krylov-steps", "2"], "data_dir": ["--data-dir", "."], "seed": ["--seed", "1"],
            "calibrated": ["--uncalibrated"],
        },
    ),
    "evaluate": Case(
        lambda folder: [images(folder), "-r", images(folder, (6, 16, 16, 3)), "-m", "diversity"],
        {
            "reference": ["-r", "nowhere"], "metrics": ["-m", "fid,nothing"], "inception": ["--inception", "nowhere"],
            "classifier": ["--classifier", "mnist-classifier"], "limit": ["--limit", "3"], "groups": ["--groups", "2"],
            "size": ["--size", "8"], "data_dir": ["--data-dir", "."], "compare": ["--compare", "nowhere"],
            "force": ["--force"], "as_json": "prints the record", "batch_size": "as many images in other parts",
            "seed": ["--seed", "1"],
        },
        "out.json",
    ),
    "judge": Case(
        lambda folder: [arrays(folder, "draws.npz", draws=(5, 12, 2), truth=(12, 2))],
        {
            "truth": lambda folder: ["--truth", arrays(folder, "truth.npz", truth=(12, 2))],
            "suite": ["--suite", "nowhere.py"], "count": ["--draws", "6"], "cases": ["--cases", "20"],
            "seed": ["--seed", "1"],
        },
    ),
    "judge of a suite": Case(
        lambda folder: ["--suite", written(folder, "sampler.py", SAMPLER), "--draws", "5", "--cases", "12"],
        {
            "truth": ["--truth", "nowhere"], "suite": "above", "count": ["--draws", "6"], "cases": ["--cases", "14"],
            "seed": ["--seed", "1"],
        },
    ),
    "diagnose": Case(
        lambda folder: [arrays(folder, "chain.npz", samples=(20, 2, 2))],
        {"modes": lambda folder: ["--modes", arrays(folder, "modes.npz", modes=(2, 2))], "burn_in": ["--burn-in", "4"]},
    ),
    "plane of a point": Case(
        lambda folder: ["mog", "--at", "0.2,0.1"],
        {
            "sigma": ["--sigma", "0.4"], "at": ["--at", "0.3,0.1"], "method": ["--method", "exact"],
            "chains": ["--chains", "3"], "steps": ["--steps", "2"], "seed": ["--seed", "1"],
        },
    ),
    "plane of chains": Case(
        lambda folder: ["mog", "--chains", "4", "--steps", "3"],
        {
            "sigma": ["--sigma", "0.4"], "at": ["--at", "0.3,0.1"], "method": ["--method", "exact"],
            "chains": ["--chains", "5"], "steps": ["--steps", "2"], "seed": ["--seed", "1"],
        },
    ),
    "export": Case(
        lambda folder: [model(folder)],
        {"dtype": ["--dtype", "float32"], "shard_mb": ["--shard-mb", "0.01"]},
    ),
    "models": Case(lambda folder: [], {"as_json": ["--json"]}, None),
    "train": Case(
        lambda folder: ["--data", "mog", "--model", "mlp", "--sigma", "0.3", "--steps", "2", "--set", "batch_size=4",
                        "--set", "network.width=8", "--set", "limit=8", "--set", "validate_every=none"],
        {
            "config": ["--config", "nowhere.yaml"], "override": ["--set", "limit=9"], "data": ["--data", "rings"],
            "data_dir": ["--data-dir", "."], "size": ["--size", "8"], "unreadable": ["--unreadable", "skip"],
            "model": ["--model", "unet-tiny"], "param": ["--param", "score"], "loss": ["--loss", "kl"],
            "denoiser": ["--denoiser", "mnist"], "probes": ["--probes", "2"], "sigma": ["--sigma", "0.4"],
            "levels": ["--levels", "geometric:3:4:0.2"], "weighting": ["--weighting", "noise"],
            "init": ["--init", "nowhere"], "steps": ["--steps", "3"], "epochs": ["--epochs", "2"],
            "minutes": "by the clock", "batch_size": ["--batch-size", "2"], "learning_rate": ["--learning-rate", "0.1"],
            "precision": ["--precision", "bf16"], "watch": ["--watch", "4"], "seed": ["--seed", "1"],
        },
    ),
    "train muon": Case(
        lambda folder: ["--data", picture_folder(folder), "--model", "unet-tiny", "--sigma", "0.3", "--steps", "1",
                        "--set", "batch_size=2", "--set", "network.multipliers=[1]", "--set", "validate_every=none",
                        ],
        {"override": ["--set", "optimiser=muon"], "size": ["--size", "8"], "data_dir": ["--data-dir", "."]},
    ),
}  # fmt: skip


def command_of(name: str) -> Any:
    return get_command(app).commands[name.split()[0]]


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(one) for key, one in value.items() if not any(time in key for time in TIMES)}
    return [without_times(one) for one in value] if isinstance(value, list) else value


def content(file: Path) -> bytes:
    """What a file says, times left out."""
    if file.suffix in (".json", ".jsonl"):
        lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
        return json.dumps([without_times(json.loads(line)) for line in lines]).encode()
    return file.read_bytes()


def outcome(name: str, inputs: Path, out: Path, added: list[str]) -> tuple[int, str, str]:
    """The status, what was printed, and a digest of the files that were written."""
    out.mkdir()
    result = CliRunner().invoke(app, [name.split()[0], *CASES[name].words(inputs), *CASES[name].to(out), *added])
    digest = hashlib.sha256()
    for file in sorted(path for path in out.rglob("*") if path.suffix in SETTLED):
        digest.update(str(file.relative_to(out)).encode() + content(file))
    printed = result.output if result.exit_code or not CASES[name].file else ""
    return result.exit_code, printed, digest.hexdigest()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inputs")


@functools.cache
def plain_outcome(name: str, inputs: Path) -> tuple[int, str, str]:
    """What the command gives without the option, the same twice."""
    first, second = (outcome(name, inputs, inputs / f"{name} {i}", []) for i in (0, 1))
    assert first[0] == 0, first[1]
    assert first == second, "the same command wrote other files"
    return first


TRIED = [
    (name, option) for name, case in CASES.items() for option, added in case.options.items() if added != str(added)
]


@pytest.mark.parametrize(("name", "option"), TRIED, ids=[f"{name}: {option}" for name, option in TRIED])
def test_an_option_acts_or_is_refused(name: str, option: str, inputs: Path, tmp_path: Path) -> None:
    added = CASES[name].options[option]
    words = added(inputs) if callable(added) else added
    plain = plain_outcome(name, inputs)
    made = outcome(name, inputs, tmp_path / "out", list(words))
    assert made[0] in (0, 2), made[1]
    assert made != plain, f"{' '.join(words)} changed nothing"


@pytest.mark.parametrize(
    "words",
    [
        *(
            ["sample", "mnist", option, value]
            for option in ("--churn", "--guidance", "--floor")
            for value in ("nan", "inf")
        ),
        ["sample", "mnist", "--covariance", ""],
        ["restore", "cifar10", "x.png", "--operator", "gray", "--noise", "0.1", "--out", "r", "--covariance", ""],
        ["posterior", "cifar10", "x.png", "--sigma", "0.3", "--out", "p", "--tolerance", "nan"],
        ["train", "--out", "t", "--sigma", "nan"],
        ["export", "mnist", "--out", "e", "--shard-mb", "nan"],
        ["plane", "mog", "--at", "0,0", "--out", "p", "--sigma", "nan"],
        ["bench", "restore", "--noise", "nan"],
    ],
    ids=" ".join,
)
def test_numbers_are_numbers_and_texts_not_empty(words: list[str]) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "Invalid value for" in result.output or "must be a finite number, got inf" in result.output


def test_an_option_beside_its_own_key_is_refused(tmp_path: Path) -> None:
    words = ["train", "--data", "mog", "--steps", "2", "--set", "steps=3", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "steps is given twice" in result.output


@pytest.mark.parametrize("name", [name for name in CASES if name != "train muon"])
def test_every_option_is_tried(name: str) -> None:
    options = {one.name for one in command_of(name).params if one.param_type_name == "option"}
    assert options == {*CASES[name].options, *(options & EXEMPT.keys())}
