"""Nothing outside an output folder is written or removed, whatever a record in it says and wherever
its links lead.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from toy_models import many_level_model
from typer.testing import CliRunner

from mmdgs.cli.app import app
from mmdgs.data.single import is_folder_name, named_images
from mmdgs.errors import UsageError
from mmdgs.files import output_folder, remove
from mmdgs.models.conversion import export_model
from mmdgs.workspace import Workspace

run = CliRunner().invoke


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder elsewhere, with names of ours in it."""
    folder = tmp_path / "victim"
    names = "page.html 000000.png 000000.json .x.mmdgs-tmp model.safetensors .last.a/b a.json"
    for name in names.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    return folder


def held(folder: Path) -> dict[str, str]:
    return {str(path): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    many_level_model((1, 8, 8)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def posterior(tmp_path: Path, model: Path, *options: str) -> object:
    np.save(tmp_path / "digit.npy", np.zeros((8, 8), np.float32))
    words = ["posterior", str(model), str(tmp_path / "digit.npy"), "--out", str(tmp_path / "out")]
    return run(app, [*words, "--sigma=0.5", "--components=0", "--draws=0", *options])


@pytest.mark.parametrize("wrong", ["../victim", "..", "digit/../../victim", None, 7])
def test_names_in_a_record_are_those_that_are_written(
    tmp_path: Path, victim: Path, model: Path, wrong: object
) -> None:
    assert posterior(tmp_path, model).exit_code == 0
    record = tmp_path / "out" / "posterior.json"
    content = json.loads(record.read_text())
    content["settings"]["names"] = ["digit", wrong]
    record.write_text(json.dumps(content))
    before = held(victim)
    result = posterior(tmp_path, model, "--overwrite")
    assert held(victim) == before
    assert result.exit_code == 2, result.output
    assert "is no name for the folder of an image" in result.output
    assert (tmp_path / "out" / "digit" / "page.html").exists()  # and nothing of it was removed


@pytest.mark.parametrize("name", ["digit", ".parts"])
def test_links_in_an_output_folder_are_refused(
    tmp_path: Path, victim: Path, model: Path, name: str
) -> None:
    assert posterior(tmp_path, model).exit_code == 0
    link = tmp_path / "out" / name
    if link.exists():
        shutil.rmtree(link)
    link.symlink_to(victim)
    before = held(victim)
    for option in ("--overwrite", "--resume"):
        found = posterior(tmp_path, model, option)
        assert found.exit_code == 2, found.output
        assert "is a link" in found.output
        assert held(victim) == before


SAMPLE = "sample MODEL -n 2 --steps 2 --covariance diagonal"
COMMANDS = {
    "sample": SAMPLE,
    "sample to an .npz": SAMPLE,
    "restore": "restore MODEL IMAGE --operator random:0 --noise .1 --covariance diagonal --draws 1",
    "train": "train --data mog --sigma 0.5 --steps 1 --set network.width=2",
}
LINKS = {
    "sample": [".parts"],
    "sample to an .npz": [".out.npz.parts"],
    "restore": [".parts", "mean", "std"],
    "train": ["checkpoints", "best", "tensorboard", "watch"],
}


@pytest.mark.parametrize(
    ("command", "link"), [(name, link) for name, links in LINKS.items() for link in links]
)
def test_commands_leave_what_links_lead_to(
    tmp_path: Path, victim: Path, model: Path, command: str, link: str
) -> None:
    np.save(tmp_path / "image.npy", np.zeros((8, 8), np.float32))
    out = tmp_path / ("out.npz" if "npz" in command else "out")
    place = tmp_path if "npz" in command else out
    place.mkdir(exist_ok=True)
    (place / link).symlink_to(victim)
    before = held(victim)
    places = {"MODEL": str(model), "IMAGE": str(tmp_path / "image.npy")}
    words = [places.get(word, word) for word in COMMANDS[command].split()]
    for option in ("--overwrite", "--resume"):
        found = run(app, [*words, "--out", str(out), option])
        assert held(victim) == before
        assert found.exit_code == 2, found.output
        assert " is a link" in " ".join(found.output.split()) or option == "--resume"


def test_a_lock_that_is_a_link_empties_no_file(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("dear")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".lock").symlink_to(tmp_path / "letter")
    with pytest.raises(UsageError, match=r"\.lock is a link"), output_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "letter").read_text() == "dear"


def test_what_a_kill_left_is_not_looked_for_behind_links(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "elsewhere").symlink_to(victim)
    before = held(victim)
    with pytest.raises(UsageError, match="elsewhere is a link"), output_folder(tmp_path / "out"):
        pass
    assert held(victim) == before


def test_an_experiment_removes_its_figures_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    names = ["a.png", "thesis.pdf", "../b.png", str(tmp_path / "c.png"), 7]
    (out / "records.json").write_text(json.dumps({"environment": {"mmdgs": "0"}, "figures": names}))
    kept = [out / "thesis.pdf", out / "b.png", tmp_path / "b.png", tmp_path / "c.png"]
    for file in [out / "a.png", *kept]:
        file.write_text("mine")
    Workspace(out, overwrite=True).close()
    assert not (out / "a.png").exists()
    assert all(file.exists() for file in kept)


@pytest.mark.parametrize("other", ["src/main.py", "notes.txt"])
def test_convert_replaces_no_folder_that_holds_more_than_a_model(
    other: str, tmp_path: Path, model: Path
) -> None:
    out = tmp_path / "project"
    (out / other).parent.mkdir(parents=True)
    for name in ("config.json", other):
        (out / name).write_text("{}")
    for command in (["convert", str(tmp_path / "a.pth")], ["export", str(model)]):
        (tmp_path / "a.pth").write_bytes(b"")
        found = run(app, [*command, "--out", str(out), "--overwrite"])
        assert found.exit_code == 2
        assert "holds more than a model" in " ".join(found.output.split())
    assert (out / other).exists()
    remove(out / Path(other).parts[0])
    export_model(model, out, overwrite=True)


def test_names_of_images_fit_into_folders(tmp_path: Path) -> None:
    names = ["画" * 82, "画" * 82 + "a", "..", "a/b", "index.html"]
    for i, name in enumerate(names):
        folder = tmp_path / str(i)
        folder.mkdir()
        np.save(folder / f"{name.replace('/', ':')[:80]}.npy", np.zeros((2, 2), np.float32))
    images = named_images([str(file) for file in sorted(tmp_path.glob("*/*.npy"))])
    assert len({image.name for image in images}) == len(names)
    assert all(is_folder_name(image.name) and len(image.name.encode()) < 140 for image in images)
    assert not any(
        is_folder_name(name)
        for name in ("..", ".", "", "a/b", "/a", "../a", ".parts", "posterior.json", 3)
    )
