"""`make kill`: runs that are killed at every file operation and at random moments, and then go on.

    python tests/kill.py [--times N] [WORD ...]      N kills at random moments each (50), and only these runs

Each run happens in a child process, which kills itself (SIGKILL) just before its k-th operation on files, for every k,
or is killed from outside after a random time. Another child goes on with it. The folder must then be that of a run that
nobody killed, byte by byte, without leftovers. Times in records are left out of the comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

EVENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.truncate")
TIMED = ("seconds", "seconds_a_sample", "watch_seconds", "minutes", "environment", "time", "steps_a_second")
"""Keys of records that differ between two runs of the same."""
HELD = ".lock"
REFUSED = 3  # the exit status of a run that was not gone on with


class Run(NamedTuple):
    """`go(folder, resume, overwrite)` works in a folder; `prepare` makes what it needs, once."""

    name: str
    go: Callable[[Path, bool, bool], object]


def runs() -> list[Run]:
    import torch
    from nets import random_images, tiny_model
    from PIL import Image
    from toy_models import exact

    from mmdgs.generation import Method, generate, make_plan
    from mmdgs.generation.restored import restore_into
    from mmdgs.lab.workspace import Part, Workspace
    from mmdgs.operators.named import parse_operator
    from mmdgs.training import Recipe, TrainingSettings, train_model

    with contextlib.suppress(ImportError):
        import torch.utils.tensorboard

    model = exact()
    plan = make_plan(Method("ddim", steps=2), model)

    def sample(folder: Path, resume: bool, overwrite: bool, *, name: str) -> None:
        more = {"floating": True} if name == "floats.npz" else {}
        generate(
            model, plan, 6, out=folder / name, batch_size=2, progress=None, resume=resume, overwrite=overwrite, **more
        )

    def train(folder: Path, resume: bool, overwrite: bool, *, recipe: Recipe) -> None:
        train_model(recipe, folder / "run", progress=None, resume=resume, overwrite=overwrite)

    sizes = TrainingSettings(steps=3, batch_size=4, checkpoint_every=1, validate_every=2, ema=0.9)
    points = Recipe(data="mog", model="mlp", network={"width": 2, "depth": 1}, sigma=0.5, limit=16, training=sizes)
    pictures = Path(tempfile.gettempdir()) / "pictures"
    pictures.mkdir(exist_ok=True)
    for i, image in enumerate(random_images(24)):
        Image.fromarray(image[0].numpy()).save(pictures / f"{i:02}.png")
    images = Recipe(data=str(pictures), model="unet-tiny", sigma=0.5, training=sizes)

    denoiser = tiny_model(
        "clean",
        sigma=None,
        sigmas=(4.0, 2.0, 1.0, 0.5, 0.1),
        options={**tiny_model().config.options, "conditional": True},
    )
    operator = parse_operator("box:4", (1, 8, 8))
    truth = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))

    def restore(folder: Path, resume: bool, overwrite: bool) -> None:
        restore_into(folder / "out", denoiser, operator(truth), operator, noise=0.1, truth=truth, covariance="diagonal",
                     steps=2, draws=2, batch_size=2, resume=resume, overwrite=overwrite, progress=None)  # fmt: skip

    def reproduce(folder: Path, resume: bool, overwrite: bool) -> None:
        place = Workspace(folder / "out", resume=resume, overwrite=overwrite)
        parts = [
            place.part(f"part {i}", {"i": i}, lambda i=i: Part({"i": i}, {"x": torch.full((3,), float(i))}))
            for i in range(4)
        ]
        place.write("figure.png", bytes(100))
        place.write_json(
            "records.json",
            {"environment": {"mmdgs": "0"}, "figures": ["figure.png"], "sum": sum(p.values["i"] for p in parts)},
        )
        place.close()

    names = ("folder", "pixels.npz", "floats.npz")
    return [
        *(Run(f"sample {name}", lambda f, r, o, name=name: sample(f, r, o, name=name)) for name in names),
        Run("train points", lambda f, r, o: train(f, r, o, recipe=points)),
        Run("train images", lambda f, r, o: train(f, r, o, recipe=images)),
        Run("restore", restore),
        Run("reproduce", reproduce),
    ]


def writes_to(folder: str, event: str, args: tuple[Any, ...]) -> bool:
    """Whether an audited event creates, renames, removes or changes a file below a folder."""
    if event == "open":
        flags = args[2] if isinstance(args[2], int) else 0
        return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) and str(args[0]).startswith(folder)
    # Names inside a folder that is being removed are relative to it.
    return event in EVENTS and (str(args[0]).startswith(folder) or not str(args[0]).startswith("/"))


class Counter:
    """Counts operations on files below a folder, and kills the process before the k-th."""

    def __init__(self, folder: Path, at: int | None) -> None:
        self.folder, self.at, self.count = str(folder), at, 0
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if writes_to(self.folder, event, args):
            self.count += 1
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)


def child(go: Callable[[], object], folder: Path, at: int | None = None, after: float | None = None) -> tuple[int, int]:
    """Run in a child that is killed at an operation, or after some seconds; its exit status and count of operations."""
    counted = folder.with_suffix(".count")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            counter = Counter(folder, at)
            go()
            code = 0
            counted.write_text(str(counter.count))
        except ValueError as error:  # UsageError
            code = REFUSED if type(error).__name__ == "UsageError" else 1
            if code == 1:
                traceback.print_exc()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if after is not None:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), int(counted.read_text()) if counted.exists() else 0


def tree(folder: Path) -> dict[str, Any]:
    """All files of a folder by name, records without their times; folders too, so that empty ones are seen."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == HELD or "tensorboard" in name:
            continue
        if path.is_dir():
            found[name] = "folder"
        elif path.suffix in (".json", ".jsonl"):
            found[name] = [_untimed(json.loads(line)) for line in _lines(path)]
        else:
            found[name] = _card(path.read_text()) if path.name == "README.md" else path.read_bytes()
    return found


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]


def _untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _untimed(one) for key, one in value.items() if key not in TIMED}
    return [_untimed(one) for one in value] if isinstance(value, list) else value


def _card(text: str) -> str:
    return "\n".join(
        line for line in text.splitlines() if not any(word in line for word in ("minutes", "seconds", "| 1 |"))
    )


def gone_on(run: Run, folder: Path) -> str | None:
    """Go on with a run that was killed; what is wrong then, or None."""
    status, _ = child(lambda: run.go(folder, True, False), folder)
    if status == REFUSED:  # there was nothing to go on from yet
        status, _ = child(lambda: run.go(folder, False, True), folder)
    return None if status == 0 else f"going on failed with status {status}"


def difference(found: dict[str, Any], whole: dict[str, Any]) -> str | None:
    left, lost = sorted(found.keys() - whole.keys()), sorted(whole.keys() - found.keys())
    changed = [name for name in found if name in whole and found[name] != whole[name]]
    if not (left or lost or changed):
        return None
    return f"left behind {left[:3]}, lost {lost[:3]}, changed {changed[:3]}"


def tried(run: Run, root: Path, times: int, rng: random.Random) -> tuple[int, int, list[str]]:
    """Kills at every operation and at random moments: how many of each, and what went wrong."""
    first = root / "whole"
    first.mkdir(parents=True)
    started = time.monotonic()
    status, operations = child(lambda: run.go(first, False, False), first)
    seconds = time.monotonic() - started
    assert status == 0, f"{run.name} failed without a kill"
    whole, wrong = tree(first), []
    folder = root / "killed"
    kills: list[tuple[str, dict[str, Any]]] = [(f"operation {k}", {"at": k}) for k in range(1, operations + 1)]
    kills += [(f"random moment {k}", {"after": rng.random() * seconds}) for k in range(times)]
    for name, how in kills:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        child(lambda: run.go(folder, False, False), folder, **how)
        said = gone_on(run, folder) or difference(tree(folder), whole)
        if said:
            wrong.append(f"{name} of {operations}: {said}")
    return operations, times, wrong


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--times", type=int, default=50)
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    failed = False
    with tempfile.TemporaryDirectory(prefix="kill-") as folder:
        tempfile.tempdir = folder
        os.environ["MMDGS_CACHE"] = f"{folder}/cache"
        chosen = [run for run in runs() if not options.words or any(word in run.name for word in options.words)]
        print("| run | kills at an operation | at a random moment | wrong |\n| --- | --- | --- | --- |", flush=True)
        for run in chosen:
            place = Path(folder) / run.name.replace(" ", "_")
            operations, times, wrong = tried(run, place, options.times, random.Random(run.name))
            failed = failed or bool(wrong)
            print(f"| {run.name} | {operations} | {times} | {len(wrong)} |", flush=True)
            for said in wrong[:8]:
                print(f"FAILED {said}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
