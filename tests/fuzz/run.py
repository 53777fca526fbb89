"""`make fuzz`: every reader of outside files, given mutated ones. Whatever it does not accept must
be our own error.

    python tests/fuzz/run.py [--cases N] [--seed S] [--jobs J] [WORD ...]
    python tests/fuzz/run.py --case I READER       one case again, with its traceback

The words choose readers by their names.
A case is known by (seed, reader, number). Each reader runs in a process of its own, which an audit
hook watches: it may write into its scratch folder alone, and may not run code, start programs or
open connections. A case has 10 seconds, and 1 GB above what the valid files take.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import mmap
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from mutations import KINDS_OF_FILE, of_bytes

SECONDS, BYTES, SPACE = 10.0, 1 << 30, 6 << 30
"""Of a case: its time, resident memory above the valid file's, and address space, which protects
the machine.
"""
OUTCOMES = ("accepted", "refused", "other", "unnamed", "hang", "memory", "executed", "crash")
FINE = OUTCOMES[:2]


CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod")
STARTS = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.", "socket.connect",
          "socket.bind", "pickle.find_class")  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Watch:
    """An audit hook that notes what a reader must not do; what is set up before `armed` is free."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.armed, self.seen = str(scratch), False, list[str]()
        own = (sys.prefix, sys.base_prefix, str(Path(__file__).resolve().parents[2]))
        self.own = (*own, "<frozen", "<string>", "<attrs")
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.armed and self._forbidden(event, args):
            self.seen.append(f"{event} {args!r}")

    def _forbidden(self, event: str, args: tuple[Any, ...]) -> bool:
        if event == "open":
            path, _, flags = args
            writes = isinstance(flags, int) and flags & WRITING and not isinstance(path, int)
            return writes and not os.fspath(path).startswith((self.scratch, "/dev/null"))
        if event in CHANGES:
            # A name below an open folder: where that is.
            folders = [number for number in args if isinstance(number, int) and number > 0]
            inside = event in ("os.remove", "os.rmdir") and folders and DESCRIPTORS.exists()
            base = os.readlink(DESCRIPTORS / str(folders[-1])) if inside else ""  # noqa: PTH115
            paths = [Path(base, part) for part in args if isinstance(part, str)]
            return any(not str(path).startswith(self.scratch) for path in paths)
        if event == "exec":
            return not getattr(args[0], "co_filename", "").startswith(self.own)
        return event.startswith(STARTS)


DESCRIPTORS, MEMORY = Path("/proc/self/fd"), Path("/proc/self/statm")


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def restored(folder: Path, files: dict[Path, bytes]) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    for file, content in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def named(error: BaseException, target: Path, folder: Path) -> bool:
    """Whether an error says which file, or which folder of those that were given."""
    return target.name in str(error) or str(folder) in str(error)


class Cases:
    """The cases of one reader in a scratch folder."""

    def __init__(self, reader: Any, scratch: Path, seed: int) -> None:
        self.reader, self.folder, self.seed = reader, scratch / "files", seed
        self.folder.mkdir(parents=True)
        reader.make(self.folder)
        self.valid = snapshot(self.folder)
        self.targets = [
            (file, mutate)
            for pattern, mutate in reader.files.items()
            for file in sorted(self.folder.glob(pattern))
        ]
        assert self.targets, f"{reader.name} has no files"
        reader.read(self.folder)  # the valid files are read
        if reader.writes:
            restored(self.folder, self.valid)

    def write(self, number: int) -> tuple[Path, bytes]:
        """Write the files of a case; which of them is mutated, and its content."""
        rng = random.Random(f"{self.seed} {self.reader.name} {number}")
        file, mutate = rng.choice(self.targets)
        if self.reader.writes:
            restored(self.folder, self.valid)
        turn, every = divmod(number, 4)  # every fourth case, until each file has been of each kind
        if every == 3 and turn < len(KINDS_OF_FILE) * len(self.targets) and not self.reader.typed:
            target, place = divmod(turn, len(KINDS_OF_FILE))
            file, kind = self.targets[target][0], [*KINDS_OF_FILE][place]
            KINDS_OF_FILE[kind](file)
            return file, kind.encode()
        try:
            content = mutate(rng, self.valid[file])
        except (RecursionError, ValueError):  # what a writer of the format cannot write is no case
            content = of_bytes(rng, self.valid[file])
        file.write_bytes(content)
        return file, content

    def clean(self, file: Path) -> None:
        if not self.reader.writes:
            if file.is_dir():
                shutil.rmtree(file)
            file.unlink(missing_ok=True)
            file.write_bytes(self.valid[file])


def resident() -> int:
    """The most memory this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def judged(cases: Cases, watch: Watch, file: Path) -> tuple[str, str]:
    """The outcome of the case whose files are written, and what there is to say of it."""
    from mmdgs.errors import UsageError

    outcome, said, before = "accepted", "", resident()
    watch.seen.clear()
    watch.armed = True
    try:
        cases.reader.read(cases.folder)
    except UsageError as error:
        plain = cases.reader.typed or named(error, file, cases.folder)
        outcome, said = "refused" if plain else "unnamed", str(error)
    except BaseException as error:
        outcome, said = "other", f"{type(error).__name__}: {error}\n{traceback.format_exc(-6)}"
    finally:
        watch.armed = False
    if watch.seen:
        return "executed", "; ".join(watch.seen[:3])
    if resident() - before > BYTES:
        return "memory", f"{(resident() - before) >> 20} MiB"
    return outcome, said


def work(
    reader: Any, scratch: Path, seed: int, numbers: range, clock: mmap.mmap, report: Any
) -> None:
    """Run cases one after the other, and report each as a line of JSON."""
    cases, watch = Cases(reader, scratch, seed), Watch(scratch)
    if MEMORY.exists():
        space = int(MEMORY.read_text().split()[0]) * mmap.PAGESIZE + SPACE
        resource.setrlimit(resource.RLIMIT_AS, (space, space))
    for number in numbers:
        file, content = cases.write(number)
        clock[:16] = struct.pack("<qd", number, time.monotonic())
        started = time.monotonic()
        outcome, said = judged(cases, watch, file)
        if time.monotonic() - started > SECONDS:
            outcome, said = "hang", f"{time.monotonic() - started:.0f} s"
        line = {"case": number, "outcome": outcome, "said": said[:3000], "file": file.name}
        if outcome not in FINE:
            kept = scratch.parent / "failures"
            kept.mkdir(exist_ok=True)
            (kept / f"{file_name(reader)}-{number}-{file.name}").write_bytes(content)
        report.write(json.dumps(line) + "\n")
        report.flush()
        cases.clean(file)
        clock[:16] = struct.pack("<qd", -1, 0.0)


def file_name(reader: Any) -> str:
    return re.sub("[ /]", "_", reader.name)


class Job:
    """A reader's cases in a child process; one that hangs or dies is started again after the case
    it died in.
    """

    def __init__(self, reader: Any, root: Path, seed: int, count: int) -> None:
        self.reader, self.root, self.seed, self.count = reader, root, seed, count
        self.results: list[dict[str, Any]] = []
        self.clock = mmap.mmap(-1, 16)
        self.starts, self.seconds = 0, 0.0
        self.start(0)

    def start(self, first: int) -> None:
        self.starts += 1
        scratch = self.root / f"{file_name(self.reader)}-{self.starts}"
        self.lines = self.root / f"{scratch.name}.jsonl"
        self.clock[:16] = struct.pack("<qd", -1, 0.0)
        self.first = first
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                tempfile.tempdir = str(scratch)
                os.fsync = lambda handle: None  # nobody cuts the power here
                os.environ |= {"MMDGS_CACHE": str(scratch / "cache"), "TMPDIR": str(scratch)}
                numbers = range(first, self.count)
                with self.lines.open("w") as report:
                    work(self.reader, scratch, self.seed, numbers, self.clock, report)
                code = 0
            except BaseException:
                traceback.print_exc(-8)
            finally:
                os._exit(code)

    def poll(self) -> bool:
        """Whether all cases are done."""
        number, since = struct.unpack("<qd", self.clock[:16])
        late = number >= 0 and time.monotonic() - since > 1.5 * SECONDS
        if late:
            os.kill(self.pid, signal.SIGKILL)
        pid, status, used = os.wait4(self.pid, 0 if late else os.WNOHANG)
        if pid == 0:
            return False
        self.seconds += used.ru_utime + used.ru_stime
        with self.lines.open() as lines:
            self.results += [json.loads(line) for line in lines]
        if os.waitstatus_to_exitcode(status) == 0:
            return True
        outcome = "hang" if late else "crash"
        self.results.append({"case": number, "outcome": outcome, "said": "killed", "file": "?"})
        if number < 0 or number + 1 >= self.count:  # outside of a case, or in the last
            return True
        self.start(number + 1)
        return False


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*")
    parser.add_argument("--cases", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--case", type=int)
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"  # children are forked, and threads are not
    import torch
    from readers import READERS

    torch.set_num_threads(1)

    logging.disable(logging.CRITICAL)
    readers = [
        reader
        for reader in READERS
        if not options.words or any(word in reader.name for word in options.words)
        if not reader.optional or importlib.util.find_spec(reader.optional)
    ]
    for package in {reader.optional for reader in readers} - {""}:
        importlib.import_module(package)
    root = Path(tempfile.mkdtemp(prefix="fuzz-"))
    if options.case is not None:
        return again(readers[0], root, options.seed, options.case)
    failed = run(readers, root, options)
    if not failed:
        shutil.rmtree(root)
    return int(failed)


def again(reader: Any, root: Path, seed: int, number: int) -> int:
    """One case, with its traceback."""
    cases = Cases(reader, root / "scratch", seed)
    file, content = cases.write(number)
    print(f"{file} ({len(content):,} bytes): {content[:300]!r}", flush=True)
    cases.reader.read(cases.folder)
    return 0


def run(readers: list[Any], root: Path, options: argparse.Namespace) -> bool:
    """Run all readers, some at a time, print a table; whether a case failed."""
    waiting, running, failed = list(readers), list[Job](), False
    total: Counter[str] = Counter()
    spent = 0.0

    def row(name: str, cells: list[str]) -> None:
        print(f"| {name} | {' | '.join(cells)} |", flush=True)

    row("reader", [*OUTCOMES, "CPU s"])
    row("---", ["---"] * (len(OUTCOMES) + 1))
    while waiting or running:
        while waiting and len(running) < options.jobs:
            running.append(Job(waiting.pop(0), root, options.seed, options.cases))
        time.sleep(0.05)
        for job in [job for job in running if job.poll()]:
            running.remove(job)
            counts = Counter(result["outcome"] for result in job.results)
            total += counts
            spent += job.seconds
            row(
                job.reader.name, [f"{counts[name]:,}" for name in OUTCOMES] + [f"{job.seconds:.1f}"]
            )
            bad = [result for result in job.results if result["outcome"] not in FINE]
            failed = failed or bool(bad)
            for result in list({result["said"][-160:]: result for result in bad}.values())[:6]:
                where = f"case {result['case']} ({result['file']}), {result['outcome']}"
                print(f"FAILED {where}: {result['said'][-900:]}")
    row(f"all {len(readers)}", [f"{total[name]:,}" for name in OUTCOMES] + [f"{spent:.0f}"])
    if failed:
        print(f"what failed is in {root / 'failures'}")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
