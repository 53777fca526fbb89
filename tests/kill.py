"""`make kill`: commands that are killed at every file operation and at random moments, and go on.

    python tests/kill.py [--times N] [WORD ...]     N random moments each (50); only these commands

Each command runs in a child process, which kills itself (SIGKILL) just before its k-th operation on
files, for every k, or is killed from outside after a random time. Another child goes on with it:
`--resume`, else `--overwrite`. The folder must then be that of a command that nobody killed, byte
by byte, without leftovers; times are left out (`tree`). Then the disk is full (a small tmpfs) at
several sizes, and read-only: an error in one line, and the same folder afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import logging
import os
import random
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

EVENTS = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.truncate")
TIMED = {
    "seconds", "seconds_a_sample", "watch_seconds", "minutes", "environment", "time",
    "steps_a_second",
}  # fmt: skip
"""Keys of records that differ between two runs of the same."""
IN_TEXT = re.compile(r"^.*(?:minutes|seconds|\| 1 \|).*$", re.MULTILINE)
"""Lines of cards and pages that say how long something took."""
HELD = ".lock"
REFUSED = 2  # the exit status of a command that has nothing to go on from yet
FULL_SIZES = 12
PAGE = 4096
ROOM = 64 << 20
COLUMNS = (
    "command", "file operations", "random moments", "started anew", "disk full", "read-only",
    "wrong",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A command by its words, the name of its output, and whether it goes on with --resume."""

    name: str
    words: str
    out: str = "out"
    resumes: bool = True

    def call(self, folder: Path, *more: str) -> tuple[int, str]:
        """Run it in this process: the exit status, and what it said."""
        os.environ["MMDGS_CACHE"] = str(folder / "cache")
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                command_line()([*shlex.split(self.words), "--out", str(folder / self.out), *more])
                status = 0
            except SystemExit as end:
                status = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
                status = 1
        return status, said.getvalue()


@cache
def command_line() -> Any:
    """`mmdgs` with the experiments beside, built once."""
    import typer

    from experiments.__main__ import app as experiments
    from mmdgs import cli

    both = typer.main.get_command(cli.app)
    both.add_command(typer.main.get_command(experiments), "experiments")
    return both


def runs(made: Path) -> list[Run]:
    """The commands, and in `made` what they read: tiny models, images, other images as MNIST's."""
    import torch
    from fakes import fake_known, fake_script
    from nets import random_images, save_pictures, tiny_pipeline
    from toy_models import many_level_model

    from experiments import digs
    from mmdgs.metrics import inception_file

    digits = random_images(24, (1, 28, 28)).numpy().tobytes()
    for prefix in ("train", "t10k"):
        images = struct.pack(">4I", 2051, 24, 28, 28) + digits
        labels = struct.pack(">2I", 2049, 24) + bytes(range(8)) * 3
        (made / f"{prefix}-images-idx3-ubyte").write_bytes(images)
        (made / f"{prefix}-labels-idx1-ubyte").write_bytes(labels)
    for name, seed in (("samples", 1), ("reference", 2)):
        save_pictures(made / name, random_images(12, seed=seed))
    model = str(many_level_model().save_pretrained(made / "model"))
    tiny_pipeline().save_pretrained(made / "pickled")
    weights = made / "pickled" / "unet" / "diffusion_pytorch_model.safetensors"
    torch.save(tiny_pipeline().unet.state_dict(), weights.with_suffix(".bin"))
    weights.unlink()
    inception_file.KNOWN = fake_known()
    digs.QUICK = digs.DigsSettings(chains=3, states=4, sweeps=1, seeds=2)

    cpu = "--device cpu --quiet"
    sample = f"sample {model} --n 6 --batch-size 2 --sampler ddim --steps 2 {cpu}"
    often = "--set steps=3 --set checkpoint_every=1 --set validate_every=2 --set ema=0.9"
    points = "--set network.width=2 --set network.depth=1 --set limit=1000 --set batch_size=1000"
    digit = "--set network.multipliers=[1] --set limit=16 --set batch_size=4"
    train = f"train --sigma 0.5 --param clean {cpu} {often}"
    measures = f"--reference {made}/reference --metrics fid,kid,diversity"
    script = fake_script(made / "fake.pt")
    restore = f"restore {model} {made}/samples --simulate --n 3 --draws 2 --operator box:4"
    restore += " --noise 0.1 --covariance diagonal --steps 2 --batch-size 2"
    rows = " ".join(
        f"--only={shlex.quote(row)}" for row in (digs.DRAWS, digs.ONE_LEVEL, digs.MOMENTS)
    )
    return [
        Run("train, 2-D", f"{train} {points} --data mog --model mlp"),
        Run("train, MNIST", f"{train} {digit} --data mnist --data-dir {made} --size 8"
                            " --model unet-tiny"),
        Run("sample, folder", sample),
        Run("sample, npz", sample, "x.npz"),
        Run("sample, npz of floats", f"{sample} --float", "x.npz"),
        Run("sample, png", sample, "x.png"),
        Run("evaluate", f"evaluate {made}/samples {measures} --inception {script} {cpu}", "e.json",
            resumes=False),
        Run("restore", f"{restore} {cpu}"),
        Run("experiments", f"experiments digs --quick {rows} {cpu}"),
        Run("convert", f"convert {made}/pickled", resumes=False),
        Run("export", f"export {model}", resumes=False),
    ]  # fmt: skip


def writes_to(folder: str, event: str, args: tuple[Any, ...]) -> bool:
    """Whether an audited event creates, renames, removes or changes a file below a folder."""
    if event == "open":
        writes = isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        return bool(writes) and str(args[0]).startswith(folder)
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


@dataclass(frozen=True)
class Ended:
    """A child's exit status (negative: the signal), what it said, its operations and seconds."""

    status: int
    said: str
    operations: int
    seconds: float


def child(
    run: Run, folder: Path, *more: str, at: int | None = None, after: float | None = None
) -> Ended:
    """Run a command in a child, which may be killed before an operation or after some seconds."""
    note = folder.with_suffix(".note")
    note.unlink(missing_ok=True)
    started, pid = time.monotonic(), os.fork()
    if pid == 0:
        status = 1
        try:
            counter = Counter(folder, at)
            status, said = run.call(folder, *more)
            note.write_text(json.dumps([counter.count, said]))
        finally:
            os._exit(status)
    if after is not None:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
    _, waited = os.waitpid(pid, 0)
    status = os.waitstatus_to_exitcode(waited)
    whole = status >= 0 and note.exists()  # a child that was killed may have been writing it
    operations, said = json.loads(note.read_text()) if whole else (0, "")
    return Ended(status, said, operations, time.monotonic() - started)


def tree(folder: Path) -> dict[str, Any]:
    """All files of a folder by name, without times in records and pages; and its folders."""
    contents: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == HELD or "tensorboard" in name:
            continue
        if path.is_dir():
            contents[name] = "folder"
        elif path.suffix in (".json", ".jsonl"):
            text = path.read_text()
            lines = text.splitlines() if path.suffix == ".jsonl" else [text]
            contents[name] = [_untimed(json.loads(line)) for line in lines]
        elif path.suffix in (".md", ".html"):
            contents[name] = IN_TEXT.sub("", path.read_text())
        else:
            contents[name] = path.read_bytes()
    return contents


def _untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _untimed(part) for key, part in value.items() if key not in TIMED}
    return [_untimed(part) for part in value] if isinstance(value, list) else value


def difference(contents: dict[str, Any], whole: dict[str, Any]) -> str | None:
    left, lost = sorted(contents.keys() - whole.keys()), sorted(whole.keys() - contents.keys())
    changed = [name for name in contents.keys() & whole if contents[name] != whole[name]]
    if not (left or lost or changed):
        return None
    return f"left behind {left[:3]}, lost {lost[:3]}, changed {changed[:3]}"


class Trial:
    """All kills of one command, in a folder of the same name each time: some records hold it."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self.folder, self.anew, self.wrong = run, folder, 0, list[str]()
        self.emptied()
        run.call(folder)  # once in this process, which then has imported all that its children need
        gc.collect()
        gc.freeze()  # so that children do not copy what is there
        trees = []
        for _ in range(2):
            self.emptied()
            self.plain = child(run, folder)
            assert self.plain.status == 0, f"{run.name} failed without a kill: {self.plain.said}"
            trees.append(tree(folder))
        self.whole = trees[0]
        assert difference(*trees) is None, f"{run.name} twice is not the same: {difference(*trees)}"

    def emptied(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def compare(self, name: str) -> None:
        """Go on, and compare with the whole run."""
        ended = child(self.run, self.folder, "--resume") if self.run.resumes else None
        if ended is None or ended.status == REFUSED:
            self.anew += ended is not None
            ended = child(self.run, self.folder, "--overwrite")
        same = difference(tree(self.folder), self.whole) if ended.status == 0 else f"it {ended}"
        if same is not None:
            self.wrong.append(f"{name}: {same}")

    def kills(self, times: int, rng: random.Random) -> None:
        for at in range(1, self.plain.operations + 1):
            self.emptied()
            child(self.run, self.folder, at=at)
            self.compare(f"operation {at} of {self.plain.operations}")
        for _ in range(times):
            self.emptied()
            after = rng.random() * self.plain.seconds
            child(self.run, self.folder, after=after)
            self.compare(f"after {after:.3f} s of {self.plain.seconds:.3f}")

    def bad_disks(self) -> tuple[int, int] | None:
        """Full and read-only disks: how many of each; None where none can be mounted here."""
        self.emptied()
        child(self.run, self.folder)
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        used = sum(-(-path.stat().st_size // PAGE) for path in files)
        self.emptied()
        if not _mounted("-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(self.folder)):
            return None
        try:
            # Parts and temporary files come on top of what is there at the end.
            shares = range(1, FULL_SIZES + 1)
            sizes = sorted({max(1, round(2 * used * share / FULL_SIZES)) for share in shares})
            for pages in sizes:
                self.emptied()
                self._remounted(f"size={pages * PAGE}")
                ended, name = child(self.run, self.folder), f"a disk of {pages} pages"
                self._must_say(ended, name, "No space left", may_end=True)
                self._remounted(f"size={ROOM}")
                self.compare(f"after {name}")
            for name, at in (("before the start", None), ("half way", self.plain.operations // 2)):
                self.emptied()
                if at is not None:
                    child(self.run, self.folder, at=at)
                before = tree(self.folder)
                self._remounted("ro")
                more = () if at is None else ("--resume",) if self.run.resumes else ("--overwrite",)
                ended = child(self.run, self.folder, *more)
                self._must_say(ended, f"read-only {name}", "Read-only file system")
                if change := difference(tree(self.folder), before):
                    self.wrong.append(f"read-only {name}: {change}")
                self._remounted("rw")
                self.compare(f"after read-only {name}")
            return len(sizes), 2
        finally:
            subprocess.run(["umount", str(self.folder)], check=True)

    def _remounted(self, how: str) -> None:
        assert _mounted("-o", f"remount,{how}", str(self.folder)), f"remount,{how} failed"

    def _must_say(self, ended: Ended, name: str, reason: str, *, may_end: bool = False) -> None:
        """A command that cannot write says one error with the reason and the folder."""
        fine = "error: " in ended.said and reason in ended.said and self.folder.name in ended.said
        fine = fine and ended.status in (1, 2) and "Traceback" not in ended.said
        if not fine and not (may_end and ended.status == 0):
            how = f"it ended with {ended.status} and said {ended.said[-300:]!r}"
            self.wrong.append(f"{name}: {how}")


def _mounted(*words: str) -> bool:
    try:
        return subprocess.run(["mount", *words], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def main(arguments: list[str]) -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--times", type=int, default=50)
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    from tqdm import tqdm

    torch.set_num_threads(1)
    # Its own lock is shared by forks: a child killed with it would stop all others.
    tqdm.set_lock(threading.RLock())
    logging.disable(logging.CRITICAL)
    failed, started = False, time.monotonic()
    memory = Path("/dev/shm")  # where writes do not wait for a disk
    place = memory if memory.is_dir() else None

    def row(cells: Iterable[object]) -> None:
        print(f"| {' | '.join(map(str, cells))} |", flush=True)

    with tempfile.TemporaryDirectory(prefix="kill-", dir=place) as folder:
        made = Path(folder, "made")
        made.mkdir()
        row(COLUMNS)
        row(["---"] * len(COLUMNS))
        for run in runs(made):
            if options.words and not any(word in run.name for word in options.words):
                continue
            trial = Trial(run, Path(folder, run.name.replace(", ", "-").replace(" ", "-")))
            trial.kills(options.times, random.Random(run.name))
            disks, wrong = trial.bad_disks() or ("not possible", "not possible"), trial.wrong
            failed = failed or bool(wrong)
            counts = (trial.plain.operations, options.times, trial.anew)
            row([run.name, *counts, *disks, len(wrong)])
            for what in wrong[:8]:
                print(f"FAILED {what}", flush=True)
    print(f"{(time.monotonic() - started) / 60:.0f} minutes")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
