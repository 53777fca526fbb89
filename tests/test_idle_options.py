"""No option is ignored: each one of each command changes what is written or printed, or is refused
in one line. Seed and precision change the numbers, not only the record of what was asked.
"""

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
import safetensors.numpy
import torch
from nets import lively
from PIL import Image
from test_loading import public_format
from toy_models import stand_in_model
from typer.main import get_command
from typer.testing import CliRunner

from mmdgs.cli import app
from mmdgs.demo import page
from mmdgs.errors import UsageError
from mmdgs.metrics import suite
from mmdgs.networks import NCSNv2

EXEMPT = {"debug", "quiet", "device", "out", "overwrite", "resume", "help"}
"""Options that change what is shown, where results go, or what becomes of those before."""
TIMES = ("seconds", "minutes", "examples_a_second")
SETTLED = (".npz", ".npy", ".png", ".safetensors", ".json", ".jsonl", ".yaml")
"""Files without times in them, but for JSON's under their names."""
SHARP = ("--seed", "--precision")
"""Options that records repeat: what was asked is no result, so arrays must change; where none are
written, a record under other names."""
UNPAINTED = b"\x89PNG"
ELSEWHERE = {"studio": "tests/test_studio.py", "bench": "tests/test_bench.py"}
"""Commands that are not run here, and where their options are tested."""


@dataclass(frozen=True)
class Case:
    """A command with its arguments; options to add to them, one at a time; and those not tried.

    Words in capitals are inputs (`INPUTS`).
    """

    words: str
    options: str
    untried: str = ""
    out: str = "out"  # what --out is, if there is one


def random_pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape[0]).integers(256, size=shape, dtype=np.uint8)


def images(count: int) -> Callable[[Path], object]:
    return lambda file: np.savez(file, arr_0=random_pixels(count, 16, 16, 3))


def arrays(**shapes: tuple[int, ...]) -> Callable[[Path], object]:
    generator = np.random.default_rng(0)
    return lambda file: np.savez(
        file, **{key: generator.normal(size=shapes[key]) for key in shapes}
    )


def pictures(folder: Path) -> None:
    folder.mkdir()
    for i, pixels in enumerate(random_pixels(8, 12, 12, 3)):
        Image.fromarray(pixels).save(folder / f"{i}.png")


def checkpoint(file: Path) -> None:
    """NCSNv2's, with a moving average that is not its weights."""
    torch.save(public_format(*(lively(NCSNv2(1, width=4), seed) for seed in (1, 2))), file)


SOURCE = """
import torch
def sample(problem, draws, generator):
    shape, dtype = (draws, problem.cases, problem.dim), problem.y.dtype
    return torch.randn(shape, generator=generator, dtype=dtype)
"""
INPUTS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "MODEL": ("model", lambda folder: stand_in_model(folder, (3, 16, 16))),
    "IMAGES": ("images.npz", images(4)),
    "OTHERS": ("others.npz", images(6)),
    "PICTURES": ("pictures", pictures),
    "DRAWS": ("draws.npz", arrays(draws=(5, 12, 2), truth=(12, 2))),
    "CHECKPOINT": ("checkpoint.pth", checkpoint),
    "TRUTH": ("truth.npz", arrays(truth=(12, 2))),
    "CHAIN": ("chain.npz", arrays(samples=(20, 2, 2))),
    "MODES": ("modes.npz", arrays(modes=(2, 2))),
    "SAMPLER": ("sampler.py", lambda file: file.write_text(SOURCE)),
}
METHOD = """--sampler ddim | --levels geometric:3:4:0.2 | --steps 4 | --covariance isotropic
    | --head nowhere | --sweeps 2 | --probes 2 | --products 1 | --products-below 1
    | --krylov-steps 2 | --most-products 5 | --symmetric | --floor 0.1 | --rate 0.1 | --eta 0.5
    | --churn 0.3 | --order 3 | --guide nowhere | --guidance 1.5 | --clip | --last-noise 1
    | --uncalibrated | --mean"""
PLANE = "--sigma 0.4 | --at 0.3,0.1 | --method exact | --chains 5 | --steps 2 | --seed 1"
CASES = {
    "sample": Case(
        "MODEL -n 2 --steps 3",
        METHOD
        + """ | -n 3 | --data mnist | --data-dir . | --size 8 | --fit-images 2 | --float
        | --chain-every 1 | --raw | --precision bf16 | --seed 1""",
        "batch_size fast",  # as many samples in other parts; acts on a GPU
        "out.npz",
    ),
    "sample of probes": Case("MODEL -n 2 --steps 2 --probes 1", METHOD, out="out.npz"),
    "restore": Case(
        "MODEL IMAGES --operator sr:2 --noise 0.1 --simulate -n 1 --draws 2 --steps 2",
        """--operator gray | --noise 0.2 | -n 2 | --draws 3 | --steps 3 | --seed 1
        | --covariance krylov | --chains bridge | --particles 2 | --data-dir . | --precision bf16
        | --products 1 | --symmetric | --uncalibrated | --quality best | --model mnist
        | --range 0,100 | --keep-clipped | --resample 0 | --inflation 1.1""",
        "batch_size simulate",  # sizes are refused without it
    ),
    "restore by particles": Case(
        "MODEL IMAGES --operator sr:2 --noise 0.1 --simulate -n 1 --draws 2 --steps 3"
        " --chains bridge --particles 4 --covariance diagonal",
        "--resample 1 | --particles 3",
    ),
    "posterior": Case(
        "MODEL IMAGES --sigma 0.5 -n 1 --components 0 --draws 0",
        """--sigma 0.4 | --simulate | --components 1 | --draws 1 | --region 0,0,4,4
        | --calibrate nowhere | --calibration-images 20 | -n 2 | --tolerance 0.1
        | --krylov-steps 2 | --draws-by spectral | --margin 8 | --quick | --data-dir .
        | --seed 1 | --uncalibrated | --model mnist | --range 0,100
        | --keep-clipped""",
    ),
    "evaluate": Case(
        "IMAGES -r OTHERS -m diversity",
        """-r nowhere | -m fid,nothing | --inception nowhere | --classifier mnist-classifier
        | --limit 3 | --groups 2 | --size 8 | --data-dir . | --compare nowhere | --force
        | --seed 1""",
        "batch_size as_json",
        "out.json",
    ),
    "evaluate a part": Case("IMAGES -r OTHERS -m diversity --limit 3", "--seed 1", out="out.json"),
    "judge": Case(
        "DRAWS", "--truth TRUTH | --suite nowhere.py | --draws 6 | --cases 20 | --seed 1"
    ),
    "judge of a suite": Case(
        "--suite SAMPLER --draws 5 --cases 12",
        "--truth nowhere | --draws 6 | --cases 14 | --seed 1",
    ),
    "diagnose": Case("CHAIN", "--modes MODES | --burn-in 4"),
    "plane of a point": Case("mog --at 0.2,0.1", PLANE),
    "plane of chains": Case("mog --chains 4 --steps 3", PLANE),
    "export": Case("MODEL", "--dtype float32 | --shard-mb 0.01"),
    "convert": Case("CHECKPOINT", "--raw | --size 8"),
    "models": Case("", "--json", out=""),
    "train": Case(
        """--data mog --model mlp --sigma 0.3 --steps 2 --set batch_size=250 --set network.width=8
        --set limit=500 --set validate_every=none""",  # few batches to validate on
        """--config nowhere.yaml | --set limit=501 | --data rings | --data-dir . | --size 8
        | --unreadable skip | --model unet-tiny | --param score | --loss kl | --denoiser mnist
        | --probes 2 | --sigma 0.4 | --levels geometric:3:4:0.2 | --weighting noise
        | --init nowhere | --steps 3 | --epochs 2 | --batch-size 2 | --learning-rate 0.1
        | --precision bf16 | --watch 4 | --seed 1""",
        "minutes",  # by the clock
    ),
    "train muon": Case(
        """--data PICTURES --model unet-tiny --sigma 0.3 --steps 1 --set batch_size=2
        --set network.multipliers=[1] --set validate_every=none""",
        "--set optimiser=muon | --size 8 | --data-dir .",
    ),
}


def tried(name: str) -> list[str]:
    return [" ".join(option.split()) for option in CASES[name].options.split("|")]


def filled(words: str, inputs: Path) -> list[str]:
    """The words, with the paths of inputs, which are made where they are not there."""
    for name in INPUTS.keys() & set(words.split()):
        file, make = INPUTS[name]
        if not (inputs / file).exists():
            make(inputs / file)
    return [str(inputs / INPUTS[word][0]) if word in INPUTS else word for word in words.split()]


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: without_times(one)
            for key, one in value.items()
            if not any(time in key for time in TIMES)
        }
    return [without_times(one) for one in value] if isinstance(value, list) else value


def content(file: Path) -> bytes:
    """What a file says, times left out."""
    if file.suffix in (".json", ".jsonl"):
        lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
        return json.dumps([without_times(json.loads(line)) for line in lines]).encode()
    return file.read_bytes()


def without_asked(value: Any) -> Any:
    """A record without what was asked for, and what is made of that."""
    asked = [word.strip("-") for word in SHARP] + ["digest", "command", "settings"]
    if isinstance(value, dict):
        return {key: without_asked(one) for key, one in value.items() if key not in asked}
    return [without_asked(one) for one in value] if isinstance(value, list) else value


def numbers_in(file: Path) -> bytes:
    """The arrays of a file, without what a model's file says of its training."""
    if file.suffix != ".safetensors":
        return file.read_bytes()
    tensors = safetensors.numpy.load_file(file)
    return b"".join(tensors[name].tobytes() for name in sorted(tensors))


def results(folder: Path) -> list[bytes]:
    """The arrays in a folder; where there are none, its records without what was asked."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in SETTLED)
    arrays = [numbers_in(file) for file in files if file.suffix in SETTLED[:4]]
    arrays = [array for array in arrays if array != UNPAINTED]
    records = [json.loads(content(file)) for file in files if file.suffix == ".json"]
    return arrays or [json.dumps(without_asked(record)).encode() for record in records]


def outcome(name: str, inputs: Path, folder: Path, added: str) -> tuple[int, str, str]:
    """The status, what was printed, and a digest of the files that were written."""
    folder.mkdir()
    case = CASES[name]
    out = ["--out", str(folder / case.out)] if case.out else []
    words = [name.split()[0], *filled(case.words, inputs), *out, *filled(added, inputs)]
    result = CliRunner().invoke(app, words)
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.suffix in SETTLED):
        digest.update(str(file.relative_to(folder)).encode() + content(file))
    printed = result.output if result.exit_code or not case.out else ""
    return result.exit_code, printed, digest.hexdigest()


@pytest.fixture(autouse=True)
def _short_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gibbs' chains of the suite of `judge`, short enough for tests."""
    for name, count in {"BURN_IN": 2, "SWEEPS": 5, "APART": 1, "MANY": 200}.items():
        monkeypatch.setattr(suite, name, count)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inputs")


@functools.cache
def plain_outcome(name: str, inputs: Path) -> tuple[int, str, str]:
    """What the command gives without the option, the same twice."""
    first, second = (outcome(name, inputs, inputs / f"{name} {i}", "") for i in (0, 1))
    assert first[0] == 0, first[1]
    assert first == second, "the same command wrote other files"
    return first


@pytest.mark.usefixtures("unpainted")
@pytest.mark.parametrize(
    ("name", "added"), [(name, added) for name in CASES for added in tried(name)]
)
def test_an_option_acts_or_is_refused(name: str, added: str, inputs: Path, tmp_path: Path) -> None:
    plain = plain_outcome(name, inputs)
    changed = outcome(name, inputs, tmp_path / "out", added)
    assert changed[0] in (0, 2), changed[1]
    assert changed != plain, f"{added} changed nothing"
    if added.split()[0] in SHARP and changed[0] == 0:
        assert results(tmp_path / "out") != results(inputs / f"{name} 0"), f"{added} is only noted"


def test_the_demo_passes_on_its_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def stopped(workspace: object, where: object, seed: int) -> None:
        seen.append(seed)
        raise UsageError("seen")

    monkeypatch.setattr(page, "demo", stopped)
    for words in ([], ["--seed", "1"]):
        CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "out"), *words])
    assert seen == [0, 1]


@pytest.mark.parametrize(
    "words",
    [
        "sample mnist --churn nan",
        "sample mnist --guidance inf",
        "sample mnist --floor inf",
        "sample mnist --covariance=",
        "restore cifar10 x.png --operator gray --noise 0.1 --out r --covariance=",
        "posterior cifar10 x.png --sigma 0.3 --out p --tolerance nan",
        "train --out t --sigma nan",
        "export mnist --out e --shard-mb nan",
    ],
)
def test_numbers_are_numbers_and_texts_not_empty(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 2
    assert "Invalid value for" in result.output or "finite number, got inf" in result.output


def test_an_option_beside_its_own_key_is_refused(tmp_path: Path) -> None:
    words = f"train --data mog --steps 2 --set steps=3 --out {tmp_path / 'out'}"
    result = CliRunner().invoke(app, words.split())
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "steps is given twice" in result.output


def test_every_command_is_run() -> None:
    commands = {name.split()[0] for name in CASES} | {"demo"}
    assert commands | set(ELSEWHERE) == set(get_command(app).commands)


@pytest.mark.parametrize("command", sorted({name.split()[0] for name in CASES}))
def test_every_option_is_tried(command: str) -> None:
    options = {
        flag: parameter.name
        for parameter in get_command(app).commands[command].params
        if parameter.param_type_name == "option"
        for flag in (*parameter.opts, *parameter.secondary_opts)
    }
    names = [name for name in CASES if name.split()[0] == command]
    named = {options[option.split()[0]] for name in names for option in tried(name)}
    untried = {option for name in names for option in CASES[name].untried.split()}
    assert not named & untried
    assert set(options.values()) - EXEMPT == named | untried
