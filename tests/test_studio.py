"""What the studio's rooms compute, without a browser (tests/studio has one)."""

from __future__ import annotations

import io
import os
import socket
import sys
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
from mmdgs.studio import image, make_examples, plane, restore, sampler, server, sources
from mmdgs.studio.folder import Folder
from mmdgs.studio.streaming import Tell, streamed


class Told(list):
    """Hears of every state."""

    __call__ = list.append

    def due(self) -> bool:
        return True


@pytest.fixture(scope="module")
def tiny() -> mmdgs.Model:
    """The exact denoiser of a Gaussian of 8 x 8 colour images, with weights to be known by."""
    law = mmdgs.targets.GaussianMixture([1.0], [[0.5] * 192], 0.2)
    levels = [mmdgs.NoiseLevel(sigma) for sigma in (2.0, 0.5, 0.05, 0.01)]
    return mmdgs.Model(law.denoiser(), torch.nn.PReLU(), levels, (3, 8, 8), source="tiny")


STORED = numpy.arange(192, dtype=numpy.uint8).reshape(3, 8, 8)


@pytest.fixture
def again(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the Python lines of a download, in its folder; the names that they define."""

    def run(download: bytes) -> dict:
        with zipfile.ZipFile(io.BytesIO(download)) as archive:
            archive.extractall(tmp_path)
        (script,) = tmp_path.glob("*/again.py")
        monkeypatch.chdir(script.parent)
        monkeypatch.setattr(mmdgs, "load", lambda name: tiny, raising=False)
        names: dict = {}
        exec(script.read_text(), names)
        return names

    return run


def test_the_lines_of_the_plane_give_what_it_shows(capsys: pytest.CaptureFixture) -> None:
    posterior = plane.look("mog", 0.3, (0.4, -0.2))
    names: dict = {}
    exec(plane.look_lines("mog", 0.3, (0.4, -0.2))[0], names)
    assert names["kl"] == pytest.approx(posterior.kl["full"], abs=1e-5)
    assert torch.allclose(names["q"].mean[0], posterior.gaussians["full"].loc)
    methods = {"full": "mog", "isotropic": "mog", "exact": "rings", "diagonal": "roll"}
    for method, density in methods.items():
        chains = plane.run_chains(density, 0.3, method, 20, 3, 4)
        exec(plane.chain_lines(density, 0.3, method, 20, 3, 4)[0], names)
        assert torch.equal(names["x"], chains.x)
        assert chains.mmd == pytest.approx(float(capsys.readouterr().out.split()[-1]))


@pytest.mark.parametrize(
    ("name", "sigma", "point"),
    [("mog", 0.05, (2.0, 2.0)), ("mog", 0.4, (0.0, 0.3)), ("roll", 0.2, (-1.2, 0.6))],
)
def test_no_gaussian_is_closer_than_the_full_one(name: str, sigma: float, point) -> None:
    kl = plane.look(name, sigma, point).kl
    assert -1e-4 <= kl["full"] <= min(kl.values()) + 1e-9


def test_clicks_and_shares() -> None:
    assert plane.clicked((0, 0)) == (-2.0, 2.0)
    assert plane.clicked((3 * plane.MAIN_SIDE / 4, plane.MAIN_SIDE / 2)) == (1.0, 0.0)
    points = torch.tensor([[-1.0, -0.9], [1.0, 1.2], [0.8, 1.0], [1.0, -1.0]]).double()
    shares = plane.shares("mog", points)
    assert [share for _, share, _ in shares] == [0.25, 0.0, 0.5, 0.25]
    assert all(right == pytest.approx(0.25) for _, _, right in shares)


def painted(alpha: int) -> dict:
    return {"layers": [numpy.full((64, 64, 4), alpha, numpy.uint8)]}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: plane.look("mug", 0.3, (0, 0)), "'mog'"),
        (lambda: plane.look("mog", 3.0, (0, 0)), "sigma .* got 3.0"),
        (lambda: plane.look("mog", 0.3, (5, 0)), "between -2 and 2"),
        (lambda: plane.run_chains("mog", 0.3, "full", chains=10**9), "chains .* 2,000"),
        (lambda: image.Image("mnist", None), "choose a sigma"),
        (lambda: image.Image("mnist", 0.5, draws=10**6), "draws must be 0 to 8"),
        (lambda: restore.Restore("cifar10", "sr:4", steps=10**6), "steps must be 2 to 50"),
        (lambda: restore.Restore("cifar10", "sr:4", clean=False), "painted mask alone"),
        (lambda: restore.operator_text("dust", {}), "'dust'"),
        (lambda: restore.painted_mask(None, (3, 8, 8)), "paint over the part"),
        (lambda: restore.painted_mask(painted(0), (3, 8, 8)), "paint over the part"),
        (lambda: restore.painted_mask(painted(255), (3, 8, 8)), "leave some"),
        (lambda: sampler.Samples("cifar10", ()), "at least one sampler"),
        (lambda: sampler.Samples("cifar10", ("hein",)), "'heun'"),
        (lambda: sources.model_of("../secrets"), "unknown model"),
        (lambda: sources.chosen_image("mnist", "../../etc/passwd"), "unknown example"),
    ],
)
def test_bad_requests_are_one_sentence(call, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_the_posterior_streams_and_its_lines_give_the_same(tiny, again) -> None:
    told = Told()
    request = image.Image("tiny", 0.3, draws=2, components=1, region=(1, 2, 4, 3))
    posterior = image.posterior_of(tiny, STORED, request, told)
    assert torch.allclose(told[0][0].mean, posterior.mean)
    assert told[-1] == (None, "5 of 5 parts are done.")
    words, moved = image.walked(posterior, [1.0])
    assert "+1.0" in words
    assert (moved != image.walked(posterior, [0.0])[1]).any()
    lines = request.lines(posterior.sigma)
    assert "--region 1,2,4,3" in lines[1]
    names = again(image.download(posterior, STORED, lines))
    assert torch.equal(names["posterior"].draws, posterior.draws)


def test_a_posterior_stops_between_products(tiny) -> None:
    stop, spent = threading.Event(), []

    def tell(_: object) -> None:
        spent.append(cost.products)
        stop.set()

    with counting() as cost, stoppable(stop), pytest.raises(Stopped):
        image.posterior_of(tiny, STORED, image.Image("tiny", 0.3, seed=9), tell)
    assert spent == [cost.products], "no product after the first word"


def test_restoration_tells_of_draws_and_its_lines_give_the_same(tiny, again, monkeypatch) -> None:
    monkeypatch.setattr(type(tiny), "posterior", lambda self, name: mmdgs.DiagonalMoments(self))
    told, mask = Told(), numpy.ones((8, 8), dtype=bool)
    mask[2:5, 3:6] = False
    request = restore.Restore("tiny", "mask.png", draws=3, steps=3)
    drawn = restore.restored(tiny, STORED, request, mask, told)
    assert [len(state.draws) for state in told if state.under_way is None] == [0, 2, 3]
    assert all(state.under_way is not None for state in told[1:3])
    assert torch.equal(told[-1].draws, drawn.draws)
    assert "PSNR" in drawn.summary()
    names = again(restore.download(drawn, STORED, request.lines(), mask))
    assert torch.allclose(names["restored"].draws[:, 0], drawn.draws, atol=1e-5)


def test_samplers_count_evaluations_and_their_lines_give_the_same(tiny, again, monkeypatch) -> None:
    diagonal = {"covariance": "diagonal", "sweeps": 2}
    monkeypatch.setattr(sampler, "OPTIONS", {"gibbs": diagonal, "langevin": {"sweeps": 2}})
    told = Told()
    request = sampler.Samples("tiny", tuple(sampler.SAMPLERS), count=2, steps=3, seed=5)
    frames = sampler.sample(tiny, request, told)
    assert list(frames) == list(sampler.SAMPLERS)
    assert frames["heun"].evaluations == 5
    assert frames["ancestral"].evaluations == frames["multistep"].evaluations == 3
    assert told[0]["gibbs"].step == 1
    names = again(sampler.download(frames, request.lines(tiny)))
    assert torch.equal(names["samples"].x, frames["multistep"].x)


def test_results_that_ship_are_those_of_the_rooms() -> None:
    """Where settings, images or weights change, `python -m mmdgs.studio.make_examples` is due."""
    keys = set()
    for request in make_examples.first_requests():
        stored = sources.chosen_image(request.model, sources.examples(request.model)[0])
        keys.add(sources.key_of(request, sources.model_of(request.model), stored))
    assert {file.stem for file in sources.EXAMPLES.glob("*.npz")} == keys
    stored, model = sources.chosen_image("mnist", "mnist-3"), sources.model_of("mnist")
    shipped = image.posterior_of(model, stored, image.Image("mnist", 0.5))
    assert len(shipped.draws) == 4
    computed = image.posterior_of(model, stored, image.Image("mnist", 0.5, draws=0, components=0))
    assert torch.allclose(shipped.mean, computed.mean, atol=2e-3)
    assert torch.allclose(shipped.std, computed.std, atol=2e-3)


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
    assert list(streamed(lambda tell: "the end")) == ["the end"]
    with pytest.raises(ZeroDivisionError):
        list(streamed(lambda tell: 1 / 0))


def test_uploads_are_bounded_and_fitted(tiny, tmp_path: Path, monkeypatch) -> None:
    ramp = numpy.arange(20 * 12, dtype=numpy.uint8).reshape(12, 20)
    Image.fromarray(ramp).save(tmp_path / "good.png")
    assert (sources.uploaded(tmp_path / "good.png", tiny, sources.CUT)[0] == ramp[2:10, 6:14]).all()
    assert sources.uploaded(tmp_path / "good.png", tiny, sources.SHRINK).shape == (1, 8, 8)
    (tmp_path / "bad.png").write_bytes(b"no image")
    (tmp_path / "large.png").write_bytes(bytes(sources.MOST_BYTES + 1))
    Image.new("1", (5000, 5000)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", sources.MOST_PIXELS)  # as the server does
    for name, words in (("bad", "not an image"), ("bomb", "limit"), ("large", "bytes")):
        with pytest.raises(UsageError, match=words):
            sources.uploaded(tmp_path / f"{name}.png", tiny)


def test_the_folder_is_emptied_of_what_is_old() -> None:
    def aged(path: Path, seconds: float) -> None:
        for part in (path, path.parent):
            os.utime(part, (time.time() - seconds,) * 2)

    folder = Folder()
    first = Path(folder.put("first.png", b"0"))
    folder.keep()
    old, new, newer = (Path(folder.put(f"{name}.zip", bytes(100_000))) for name in "abc")
    for path, seconds in ((first, 1e6), (old, 1e6), (new, 50)):
        aged(path, seconds)
    for visitor, path in (("ada", new), ("ada", old), ("bob", new)):
        folder.give(visitor, str(path))
    folder.empty(60)
    assert [path.exists() for path in (first, old, new, newer)] == [True, False, True, True]
    assert folder.holds("ada", str(new))
    assert folder.holds("eve", str(first)), "every page begins with it"
    assert not folder.holds("ada", str(old)), "it was deleted"
    assert not folder.holds("eve", str(new))
    folder.empty(60, most=150_000)
    assert [path.exists() for path in (new, newer)] == [False, True], "the oldest goes first"
    assert not folder.holds("ada", str(new))
    folder.close()
    assert not folder.path.exists()


def test_the_address_is_this_machines_alone_and_a_taken_port_is_said() -> None:
    for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        assert server.is_local(host)
    for host in ("0.0.0.0", "::", "example.org", "127.0.0.1.example.org", ""):
        assert not server.is_local(host)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="--port"):
            server.listening("127.0.0.1", taken.getsockname()[1])


def call(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.output


def test_the_command_of_the_plane(tmp_path: Path) -> None:
    out = str(tmp_path / "plane")
    status, said = call("plane", "mog", "--sigma", "0.3", "--at", "0.2,0.1", "--out", out)
    assert status == 0
    kl = plane.look("mog", 0.3, (0.2, 0.1)).kl["full"]
    assert f"full covariance: {kl:.4f} nats" in said
    with numpy.load(tmp_path / "plane" / "plane.npz") as arrays:
        assert arrays["kl_full"] == pytest.approx(kl)
    chains = ["plane", "mog", "--chains", "10", "--steps", "2", "--out", out]
    assert call(*chains)[0] == 2  # there is something already
    status, said = call(*chains, "--overwrite")
    assert status == 0
    assert f"MMD: {plane.run_chains('mog', 0.3, 'full', 10, 2).mmd:.4f}" in said
    for options, words in (([], "one of the two"), (["--at", "1"], "two numbers")):
        assert words in call("plane", "mog", *options, "--out", str(tmp_path / "no"))[1]
    assert not (tmp_path / "no").exists()


def test_the_command_asks_for_a_token_beyond_this_machine(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", sys.modules.get("gradio") or object())
    served: list = []
    monkeypatch.setattr(server, "serve", lambda host, port, token, tell: served.append(token))
    assert "got 5" in call("studio", "--token", "short")[1]
    assert "exclude" in call("studio", "--token", "long enough", "--no-token")[1]
    far = ["--host", "0.0.0.0"]
    for words in ([], ["--host", "::1"], [*far, "--no-token"], ["--token", "by hand "], far, far):
        assert call("studio", *words)[0] == 0
    assert served[:4] == [None, None, None, "by hand "]
    assert len(served[4]) >= 32
    assert served[4] != served[5]
    monkeypatch.setitem(sys.modules, "gradio", None)
    status, said = call("studio")
    assert status == 2
    assert 'pip install "mmdgs[studio]"' in said
