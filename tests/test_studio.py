"""What the studio's rooms compute, without a browser (tests/studio has one)."""

from __future__ import annotations

import io
import os
import socket
import threading
import time
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import mmdgs
from mmdgs.cli import app
from mmdgs.cost import counting
from mmdgs.errors import UsageError
from mmdgs.runtime import Stopped, stop_if_asked, stoppable
from mmdgs.studio import guard, image, make_examples, plane, restoring, sampling, server, sources
from mmdgs.studio.downloads import Folder
from mmdgs.studio.streaming import Tell, streamed


@pytest.fixture(scope="module")
def tiny() -> mmdgs.Model:
    """A denoiser of 8 x 8 colour images at many levels: the exact one of a Gaussian, with weights to be known by."""
    law = mmdgs.targets.GaussianMixture([1.0], [[0.5] * 192], 0.2)
    levels = [mmdgs.NoiseLevel(sigma) for sigma in (2.0, 0.5, 0.05, 0.01)]
    return mmdgs.Model(law.denoiser(), torch.nn.PReLU(), levels, (3, 8, 8), source="tiny")


@pytest.fixture
def stored() -> numpy.ndarray:
    return numpy.arange(192, dtype=numpy.uint8).reshape(3, 8, 8)


@pytest.mark.parametrize("name", ["mog", "rings"])
def test_the_lines_of_the_plane_give_what_it_shows(name: str, capsys: pytest.CaptureFixture) -> None:
    seen = plane.look(name, 0.3, (0.4, -0.2))
    found: dict = {}
    exec(plane.look_lines(name, 0.3, (0.4, -0.2))[0], found)
    assert found["kl"] == pytest.approx(seen.kl["full"], abs=1e-5)
    assert torch.allclose(found["q"].mean[0], seen.means["full"])
    for method in plane.METHODS:
        mixed = plane.chains(name, method, 0.3, count=20, steps=3, seed=4)
        exec(plane.chain_lines(name, method, 0.3, 20, 3, 4)[0], found)
        assert torch.equal(found["x"], mixed.x)
        assert mixed.mmd == pytest.approx(float(capsys.readouterr().out.split()[-1]))


def test_no_gaussian_is_closer_than_the_full_one() -> None:
    for name, sigma, point in (("mog", 0.05, (2.0, 2.0)), ("mog", 0.4, (0.0, 0.3)), ("roll", 0.2, (-1.2, 0.6))):
        kl = plane.look(name, sigma, point).kl
        assert -1e-4 <= kl["full"] <= min(kl.values()) + 1e-9


def test_clicks_and_shares() -> None:
    assert plane.clicked((0, 0)) == (-2.0, 2.0)
    assert plane.clicked((3 * plane.MAIN_SIDE / 4, plane.MAIN_SIDE / 2)) == (1.0, 0.0)
    law = plane.mixture_of("mog")
    found = plane.shares("mog", law, torch.tensor([[-1.0, -0.9], [1.0, 1.2], [0.8, 1.0], [1.0, -1.0]]).double())
    assert [share for _, share, _ in found] == [0.25, 0.0, 0.5, 0.25]
    assert all(right == pytest.approx(0.25) for _, _, right in found)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: plane.look("mug", 0.3, (0, 0)), "did you mean 'mog'"),
        (lambda: plane.look("mog", 3.0, (0, 0)), "sigma must lie between 0.05 and 1.0, got 3.0"),
        (lambda: plane.look("mog", 0.3, (5, 0)), "between -2 and 2"),
        (lambda: plane.chains("mog", "full", 0.3, count=10**9), "chains must lie between 1 and 2,000"),
        (lambda: image.Wanted("mnist", None), "choose a sigma"),
        (lambda: image.Wanted("mnist", 0.5, draws=10**6), "draws must be 0 to 8"),
        (lambda: restoring.Wanted("cifar10", "sr:4", steps=10**6), "steps must be 2 to 50"),
        (lambda: restoring.Wanted("cifar10", "sr:4", clean=False), "painted mask alone"),
        (lambda: restoring.painted_mask(None, (3, 8, 8)), "paint over the part"),
        (lambda: restoring.painted_mask(numpy.full((64, 64), 255), (3, 8, 8)), "the whole image is painted over"),
        (lambda: sampling.Wanted("cifar10", ()), "at least one sampler"),
        (lambda: sampling.Wanted("cifar10", ("hein",)), "did you mean 'heun'"),
        (lambda: sources.model_of("../secrets"), "unknown model"),
        (lambda: sources.example("mnist", "../../etc/passwd"), "unknown example"),
    ],
)
def test_bad_requests_are_one_sentence(call, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_the_posterior_streams_and_its_lines_give_the_same(tiny, stored, tmp_path: Path, monkeypatch) -> None:
    told: list = []
    wanted = image.Wanted("tiny", 0.3, draws=2, components=1, region=(1, 2, 4, 3))
    seen = image.posterior_of(tiny, stored, wanted, tell=told.append)
    assert isinstance(told[0], mmdgs.ImagePosterior)
    assert told[-1] == (5, 5)
    assert torch.allclose(told[0].mean, seen.mean)
    again = image.posterior_of(tiny, stored, wanted)  # kept
    assert torch.equal(again.draws, seen.draws)
    assert again.scores == pytest.approx(seen.scores)
    moved = image.moved(seen, [1.0])
    assert moved.shape == image.moved(seen, [0.0]).shape
    assert (moved != image.moved(seen, [0.0])).any()
    with zipfile.ZipFile(io.BytesIO(image.download(seen, stored, wanted))) as archive:
        archive.extractall(tmp_path)
    monkeypatch.chdir(tmp_path / "posterior")
    monkeypatch.setattr(mmdgs, "load", lambda name: tiny, raising=False)
    found: dict = {}
    exec(Path("again.py").read_text(), found)
    assert torch.equal(found["seen"].draws, seen.draws)
    assert "--region 1,2,4,3" in Path("again.txt").read_text()


def test_a_posterior_stops_between_products(tiny, stored) -> None:
    stop, spent = threading.Event(), []

    def tell(_: object) -> None:
        spent.append(cost.products)
        stop.set()

    with counting() as cost, stoppable(stop), pytest.raises(Stopped):
        image.posterior_of(tiny, stored, image.Wanted("tiny", 0.3, seed=9), tell=tell)
    assert spent == [cost.products], "no product after the first word"


def test_restoration_tells_of_draws_and_its_lines_give_the_same(tiny, stored, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(type(tiny), "posterior", lambda self, name: mmdgs.DiagonalMoments(self))
    told: list[restoring.Drawn] = []
    mask = numpy.ones((8, 8), dtype=bool)
    mask[2:5, 3:6] = False
    wanted = restoring.Wanted("tiny", "mask.png", draws=3, steps=3)
    seen = restoring.restored(tiny, stored, wanted, mask, tell=told.append, due=lambda: True)
    assert [len(one.draws) for one in told if one.under_way is None] == [0, 2, 3]
    assert all(one.under_way is not None for one in told[1:3])
    assert torch.equal(told[-1].draws, seen.draws)
    with zipfile.ZipFile(io.BytesIO(restoring.download(seen, stored, wanted, mask))) as archive:
        archive.extractall(tmp_path)
    monkeypatch.chdir(tmp_path / "restored")
    monkeypatch.setattr(mmdgs, "load", lambda name: tiny, raising=False)
    found: dict = {}
    exec(Path("again.py").read_text(), found)
    assert torch.allclose(found["found"].draws[:, 0], seen.draws, atol=1e-5)


def test_samplers_count_evaluations_and_their_lines_give_the_same(tiny, monkeypatch) -> None:
    monkeypatch.setitem(sampling.OPTIONS, "gibbs", {"covariance": "diagonal", "sweeps": 2, "probes": 1})
    monkeypatch.setitem(sampling.OPTIONS, "ancestral", {})
    told: list[dict] = []
    wanted = sampling.Wanted("tiny", tuple(sampling.WORDS), count=2, steps=3, seed=5)
    frames = sampling.sampled(tiny, wanted, tell=told.append, due=lambda: True)
    assert list(frames) == list(sampling.WORDS)
    assert frames["heun"].evaluations == 5
    assert frames["ancestral"].evaluations == frames["multistep"].evaluations == 3
    assert told[0]["gibbs"].step == 1
    monkeypatch.setattr(mmdgs, "load", lambda name: tiny, raising=False)
    found: dict = {}
    exec(sampling.lines(wanted, tiny)[0], found)
    assert torch.equal(found["found"].x, frames[wanted.samplers[-1]].x)


def test_results_that_ship_are_those_of_the_rooms() -> None:
    """Where settings, images or weights change, `python -m mmdgs.studio.make_examples` makes them again."""
    shipped = {file.stem for file in sources.EXAMPLES.glob("*.npz")}
    firsts = [make_examples.first_image(name) for name in sources.models()]
    asked = {wanted.key(stored, sources.model_of(wanted.model)) for stored, wanted in firsts}
    rest = [make_examples.first_restored(name) for name in sources.models(many_levels=True)]
    asked |= {wanted.key(stored, None, sources.model_of(wanted.model)) for stored, wanted in rest}
    assert shipped == asked
    stored, wanted = firsts[0]
    model = sources.model_of(wanted.model)
    kept = sources.tensors({k: v for k, v in sources.kept(wanted.key(stored, model)).items() if v.dtype.kind == "f"})
    few = image.Wanted(wanted.model, wanted.sigma, draws=0, components=0)
    seen = image.posterior_of(model, stored, few)
    assert torch.allclose(kept["mean"], seen.mean, atol=2e-3)
    assert torch.allclose(kept["std"], seen.std, atol=2e-3)


def test_work_stops_where_its_listener_leaves_or_says_so() -> None:
    seen: list[int] = []

    def work(tell: Tell) -> None:
        for i in range(10_000):
            stop_if_asked()
            seen.append(i)
            tell(i)
            time.sleep(0.01)

    stream = streamed(work)
    assert next(stream) is not None
    stream.close()
    time.sleep(0.1)
    count = len(seen)
    time.sleep(0.1)
    assert len(seen) == count < 1000
    stop = threading.Event()
    stream = streamed(work, stop)
    next(stream)
    stop.set()
    assert len(list(stream)) < 100
    with pytest.raises(ZeroDivisionError):
        list(streamed(lambda tell: 1 / 0))


def test_uploads_are_bounded_and_fitted(tiny, tmp_path: Path) -> None:
    ramp = numpy.arange(20 * 12, dtype=numpy.uint8).reshape(12, 20)
    Image.fromarray(ramp).save(tmp_path / "good.png")
    assert (sources.uploaded(tmp_path / "good.png", tiny, sources.CUT)[0] == ramp[2:10, 6:14]).all()
    assert sources.uploaded(tmp_path / "good.png", tiny, sources.SHRINK).shape == (1, 8, 8)
    (tmp_path / "bad.png").write_bytes(b"no image")
    Image.new("1", (8000, 8000)).save(tmp_path / "bomb.png")
    (tmp_path / "large.png").write_bytes(bytes(sources.MOST_BYTES + 1))
    for name, words in (("bad", "not an image"), ("bomb", "more than the limit"), ("large", "bytes")):
        with pytest.raises(UsageError, match=words):
            sources.uploaded(tmp_path / f"{name}.png", tiny)


def test_the_folder_is_emptied_of_what_is_old() -> None:
    folder = Folder()
    first = Path(folder.put("first.png", b"0"))
    folder.keep()
    old, new = Path(folder.put("old.zip", b"1")), Path(folder.put("new.zip", b"2"))
    for one in (first, first.parent, old, old.parent):
        os.utime(one, (0, 0))
    folder.empty(60)
    assert not old.parent.exists()
    assert first.read_bytes() == b"0", "every page begins with it"
    assert new.read_bytes() == b"2"
    for visitor, path in (("ada", new), ("ada", old), ("bob", new)):
        folder.give(visitor, str(path))
    newer = Path(folder.put("newer.zip", bytes(100_000)))
    os.utime(new, (time.time() - 50, time.time() - 50))
    os.utime(new.parent, (time.time() - 50, time.time() - 50))
    folder.empty(60, most=150_000)
    assert folder.holds("ada", str(new))
    assert not folder.holds("ada", str(old)), "it was deleted"
    assert not folder.holds("eve", str(new))
    assert folder.holds("eve", str(first))
    folder.empty(60, most=newer.stat().st_size + newer.parent.stat().st_size)
    assert newer.exists()
    assert not new.exists(), "the oldest goes where the folder is full"
    assert not folder.holds("ada", str(new))
    folder.close()
    assert not folder.path.exists()


def test_the_address_is_this_machines_alone_and_a_taken_port_is_said() -> None:
    for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        assert guard.is_local(host)
    for host in ("0.0.0.0", "::", "example.org", "127.0.0.1.example.org", ""):
        assert not guard.is_local(host)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="choose another --port"):
            server.listening("127.0.0.1", taken.getsockname()[1])


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, list(words))
        return result.exit_code, result.output

    out = str(tmp_path / "plane")
    status, said = call("plane", "mog", "--sigma", "0.3", "--at", "0.2,0.1", "--out", out)
    assert status == 0
    assert f"full covariance: {plane.look('mog', 0.3, (0.2, 0.1)).kl['full']:.4f} nats" in said
    with numpy.load(tmp_path / "plane" / "plane.npz") as found:
        assert found["kl_full"] == pytest.approx(plane.look("mog", 0.3, (0.2, 0.1)).kl["full"])
    assert call("plane", "mog", "--chains", "10", "--steps", "2", "--out", out)[0] == 2  # there is something already
    status, said = call("plane", "mog", "--chains", "10", "--steps", "2", "--out", out, "--overwrite")
    assert status == 0
    assert f"MMD: {plane.chains('mog', 'full', 0.3, count=10, steps=2).mmd:.4f}" in said
    assert "one of the two" in call("plane", "mog", "--out", str(tmp_path / "no"))[1]
    assert "two numbers" in call("plane", "mog", "--at", "1", "--out", str(tmp_path / "no"))[1]
    assert not (tmp_path / "no").exists()
    modules = __import__("sys").modules
    monkeypatch.setitem(modules, "gradio", modules.get("gradio") or object())
    assert "--token must have at least 8 characters, got 5" in call("studio", "--token", "short")[1]
    assert "exclude each other" in call("studio", "--token", "long enough", "--no-token")[1]
    served: list = []
    monkeypatch.setattr(server, "serve", lambda host, port, token, tell: served.append(token))
    for words in ([], ["--host", "::1"], ["--host", "0.0.0.0", "--no-token"], ["--token", "chosen by hand"]):
        assert call("studio", *words)[0] == 0
    assert served == [None, None, None, "chosen by hand"]
    for _ in range(2):
        assert call("studio", "--host", "0.0.0.0")[0] == 0
    assert len(served[-1]) >= 32
    assert served[-1] != served[-2]
    monkeypatch.setitem(modules, "gradio", None)
    status, said = call("studio")
    assert status == 2
    assert 'pip install "mmdgs[studio]"' in said
