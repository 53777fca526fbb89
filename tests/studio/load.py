"""Load on the studio: so many users at once for ten minutes, over its own interface; errors, times and memory.

    python tests/studio/load.py [--users 20] [--seconds 600]

Every user opens the page, goes round (a noisy point of the plane, chains there, the posterior of the example, samples),
leaves, and comes again as somebody new. It ends with status 1 where there was an error, or memory is not flat: the
median of the last fifth of the time is more than a tenth above that of the second fifth.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from gradio_client import Client

GROWTH = 1.1
READINGS = 100


def started(log: Path) -> tuple[subprocess.Popen, str]:
    with log.open("w") as stream:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        words = [sys.executable, "-m", "mmdgs", "studio", "--port", "0"]
        process = subprocess.Popen(words, stdout=stream, stderr=stream, env=environment)
    for _ in range(1200):
        if found := re.search(r"http://\S+", log.read_text()):
            return process, found.group()
        time.sleep(0.1)
    raise SystemExit(log.read_text())


def resident(process: subprocess.Popen) -> float:
    """Memory of the server, in MB."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text).group(1)) / 1024


def user(address: str, number: int, until: float, times: dict[str, list[float]], errors: list[str]) -> None:
    rounds = {
        "/look": ("mog", 0.3, 0.1 * (number % 10), 0.2),
        "/plane": ("mog", 0.3, "full", 100, 20, number),
        "/image": ("mnist", "mnist-3", None, "cut out the centre", True, 0.5, False, 4, 3, 0),
        "/sampler": ("mnist", ["gibbs"], 1, 5, number),
    }
    try:
        while time.monotonic() < until:
            client = Client(address, verbose=False)
            for name, given in rounds.items():
                begun = time.monotonic()
                job = client.submit(*given, api_name=name)
                for _ in job:
                    pass
                if (error := job.exception()) is not None:
                    errors.append(f"{name}: {error}")
                times.setdefault(name, []).append(time.monotonic() - begun)
            client.close()
    except Exception as error:
        errors.append(f"user {number}: {error!r}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=600.0)
    asked = parser.parse_args()
    times: dict[str, list[float]] = {}
    errors: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        process, address = started(Path(folder) / "log")
        try:
            Client(address, verbose=False)  # it answers
            time.sleep(5)  # models are loaded
            memory, until = [resident(process)], time.monotonic() + asked.seconds
            people = [
                threading.Thread(target=user, args=(address, i, until, times, errors)) for i in range(asked.users)
            ]
            for one in people:
                one.start()
            while time.monotonic() < until:
                time.sleep(asked.seconds / READINGS)
                memory.append(resident(process))
            for one in people:
                one.join()
        finally:
            process.terminate()
            process.wait(20)
        log = (Path(folder) / "log").read_text()
    for name, found in times.items():
        p95 = sorted(found)[int(0.95 * (len(found) - 1))]
        print(f"{name}: {len(found)} requests, median {statistics.median(found):.2f} s, 95% {p95:.2f} s")
    fifth = len(memory) // 5
    medians = [statistics.median(memory[i * fifth : (i + 1) * fifth]) for i in range(5)]
    growth = medians[4] / medians[1]
    print(
        f"memory (MB): {memory[0]:.0f} at the start, medians of each fifth", " ".join(f"{one:.0f}" for one in medians)
    )
    print(f"the largest: {max(memory):.0f}; the last fifth over the second: {growth:.3f}; errors: {len(errors)}")
    print("\n".join([*errors[:5], *(["the log:", log] if "Traceback" in log else [])]))
    return int(bool(errors) or "Traceback" in log or growth > GROWTH)


if __name__ == "__main__":
    sys.exit(main())
