"""What the studio's rooms compute, without a browser (tests/studio has one)."""

from __future__ import annotations

import io
import os
import socket
import sys
import threading
import time
import zipfile
from dataclasses import replace
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
from mmdgs.restoration.folder import scores_of
from mmdgs.restoration.settings import QUALITIES
from mmdgs.runtime import Stopped, stop_if_asked, stoppable
from mmdgs.studio import image, make_examples, pictures, plane, restore, sampler, server, sources
from mmdgs.studio.folder import Folder
from mmdgs.studio.streaming import Tell, streamed
from mmdgs.uncertainty.estimators import level_of
from mmdgs.uncertainty.pictures import pixels as shown_as


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


def restored_files(drawn: restore.Drawn, request: restore.Restore) -> set[str]:
    """The names in a download."""
    download = restore.download(drawn, STORED, request.lines((3, 8, 8)), None)
    with zipfile.ZipFile(io.BytesIO(download)) as archive:
        return {Path(name).name for name in archive.namelist()}


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
        (lambda: restore.Restore("cifar10", "sr:4", quality="god"), "'good'"),
        (lambda: restore.Restore("cifar10", "sr:4", noise=None), "choose a noise"),
        (lambda: restore.Restore("cifar10", "random:0.7", clean=False), "paint them"),
        (lambda: restore.operator_text("dust", {}), "'dust'"),
        (lambda: restore.painted_mask(None, (3, 8, 8)), "paint over the part"),
        (lambda: restore.painted_mask(painted(0), (3, 8, 8)), "paint over the part"),
        (lambda: restore.painted_mask(painted(255), (3, 8, 8)), "leave some"),
        (lambda: sampler.Samples("cifar10", ()), "at least one sampler"),
        (lambda: sampler.Samples("cifar10", ("hein",)), "'heun'"),
        (lambda: sources.model_of("../secrets"), "unknown model"),
        (lambda: sources.chosen_image("mnist", "../../etc/passwd"), "unknown example"),
        (lambda: sources.chosen_image("photo", sources.OWN), "upload an image first"),
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
    assert told[-1] == (told[0][0], "5 of 5 parts are done.")
    words, moved = image.walked(posterior, [1.0])
    assert "+1.0" in words
    assert moved.shape == (3, 4, 3), "the region alone"
    assert (moved != image.walked(posterior, [0.0])[1]).any()
    step = posterior.mean + posterior.stds[0] * posterior.directions[0]
    assert (moved == shown_as(step[:, 2:5, 1:5])).all()
    assert f"hold {100 * posterior.scores['coverage_90']:.0f}% of" in image.summary(posterior)
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
    monkeypatch.setitem(QUALITIES, "fast", (QUALITIES["fast"][0], 3))
    request = restore.Restore("tiny", "mask.png", draws=3, quality="fast")
    drawn = restore.restored(tiny, STORED, request, mask, told)
    assert [len(state.draws) for state in told if state.under_way is None] == [0, 2, 3]
    assert all(state.under_way is not None for state in told[1:3])
    assert [state.done for state in told] == [(done, 9) for done in (0, 2, 4, 6, 7, 8, 9)]
    assert torch.equal(told[-1].draws, drawn.draws)
    assert "PSNR" in drawn.summary()
    share = scores_of(drawn.draws[:, None], drawn.truth[None])["coverage_90"]
    assert f"hold {100 * share:.0f}% of the pixels" in drawn.summary()
    assert "measured.npy" in restored_files(told[0], request), "a stop before the first draw"
    names = again(restore.download(drawn, STORED, request.lines((3, 8, 8)), mask))
    assert torch.allclose(names["restored"].draws[:, 0], drawn.draws, atol=1e-5)


@pytest.fixture
def photo(monkeypatch: pytest.MonkeyPatch) -> mmdgs.Model:
    """A model of any size where the studio looks for the one of photographs."""
    law = mmdgs.targets.GaussianMixture([1.0], [[0.5] * 3], 0.2)
    exact = law.denoiser()

    def pixel_by_pixel(x_t: torch.Tensor, level: mmdgs.NoiseLevel) -> torch.Tensor:
        return (
            exact(x_t.movedim(1, -1).flatten(0, 2), level)
            .reshape(len(x_t), *x_t.shape[2:], 3)
            .movedim(-1, 1)
        )

    levels = [mmdgs.NoiseLevel(sigma) for sigma in (2.0, 0.5, 0.05, 0.01)]
    model = mmdgs.Model(pixel_by_pixel, torch.nn.PReLU(), levels, (3, None, None), source="photo")
    folders = {"photo": Path(), **sources.shipped_folders()}
    monkeypatch.setattr(sources, "shipped_folders", lambda: folders)
    monkeypatch.setitem(sources._models, "photo", model)
    sources.seconds_of.cache_clear()
    return model


def saved(path: Path, height: int, width: int, channels: int = 3) -> Path:
    """A picture as a file, whose pixels all differ from their neighbours."""
    values = numpy.arange(height * width * channels, dtype=numpy.uint32) * 37 % 251
    Image.fromarray(values.astype(numpy.uint8).reshape(height, width, channels)).save(path)
    return path


def test_the_model_of_any_size_comes_first_where_it_is_here(photo) -> None:
    assert sources.models()[0] == sources.models(restoring=True)[0] == "photo"
    assert "photo" not in sources.models(sampling=True)
    assert "mnist" not in sources.models(restoring=True)


GREY = numpy.arange(8 * 12, dtype=numpy.uint8).reshape(1, 8, 12)


def test_a_model_of_any_size_takes_an_upload_as_it_is(photo, tmp_path: Path, monkeypatch) -> None:
    path = saved(tmp_path / "own.png", 20, 30)
    assert image.posterior_of(photo, GREY, image.Image("photo", 0.2, draws=1)).draws.shape == (
        1, *GREY.shape,
    )  # fmt: skip
    whole = numpy.asarray(Image.open(path)).transpose(2, 0, 1)
    for fit in sources.FITS:
        assert (sources.uploaded(path, photo, fit) == whole).all()
    assert sources.described(whole, str(path)) == "30 x 20 pixels of your own"
    monkeypatch.setattr(sources, "MOST_WORKED", 150)
    cut = sources.uploaded(path, photo, sources.CUT)
    assert (cut == whole[:, 5:15, 7:22]).all()
    shrunk = sources.uploaded(path, photo, sources.SHRINK)
    assert (shrunk.shape, shrunk.dtype) == ((3, 10, 15), numpy.uint8)
    assert abs(shrunk.mean() - whole.mean()) < 3
    assert sources.described(shrunk, str(path)) == "15 x 10 pixels of the upload's 600"


def test_time_grows_with_pixels_and_evaluations(photo, monkeypatch) -> None:
    monkeypatch.setattr(sources, "seconds_of", lambda name: 1e-6)
    for sides, evaluations, words in (
        ((100, 100), 10, "about 1 s"),
        ((500, 400), 100, "about 20 s"),
        ((500, 400), 1500, "about 5 minutes"),
    ):
        assert sources.duration("photo", (3, *sides), evaluations) == words
    monkeypatch.undo()
    assert 0 < sources.seconds_of("cifar10") < 0.01


def test_a_click_adds_the_components_around_it_and_draws_stay(photo) -> None:
    assert image.region_around((0.5, 0.5), 90, 120) == (40, 30, 40, 30)
    assert image.region_around((0.99, 0.01), 300, 400) == (336, 0, 64, 64)
    assert image.region_around((0, 1), 6, 9) == (0, 0, 8, 6)
    stored = numpy.arange(3 * 12 * 16, dtype=numpy.uint8).reshape(3, 12, 16)
    request = image.Image("photo", 0.2, draws=2, components=1, region=(0, 0, 8, 8))
    whole = image.posterior_of(photo, stored, request)
    with counting() as cost:
        moved = replace(request, region=(8, 4, 8, 8))
        part = image.posterior_of(photo, stored, moved, known=whole)
    assert cost.products < whole.cost.products
    assert torch.equal(part.draws, whole.draws)
    assert torch.equal(part.mean, whole.mean)
    assert part.region == (8, 4, 8, 8)
    outside = part.directions.clone()
    outside[..., 4:, 8:] = 0
    assert not outside.any()


def test_a_damaged_image_of_any_size_is_the_measurement(photo, again, monkeypatch) -> None:
    diagonal = (mmdgs.covariances.Diagonal(probes=2), 3)
    for quality in QUALITIES:
        monkeypatch.setitem(QUALITIES, quality, diagonal)
    stored = numpy.arange(3 * 8 * 12, dtype=numpy.uint8).reshape(3, 8, 12)
    for operator, shape in (("blur:1", (3, 8, 12)), ("sr:2", (3, 16, 24))):
        request = restore.Restore("photo", operator, clean=False, draws=2)
        drawn = restore.restored(photo, stored, request)
        assert drawn.truth is None
        assert torch.equal(drawn.y, sources.in_units(stored))
        assert drawn.draws.shape == (2, *shape)
        assert "--simulate" not in request.lines(shape)[1]
    request = restore.Restore("photo", "sr:3", draws=1)
    assert restore.restored(photo, stored, request).draws.shape == (1, 3, 6, 12), "cropped"
    model, request = sources.model_of("cifar10"), restore.Restore("cifar10", "sr:4", clean=False)
    with pytest.raises(UsageError, match="has 12 x 8 pixels; expected 8 x 8"):
        restore.restored(model, stored, request)
    grey = restore.restored(photo, stored[:1], restore.Restore("photo", "sr:2", draws=2))
    assert grey.draws.shape == (2, 1, 8, 12), "one channel, measured once"
    request = restore.Restore("photo", "gray", noise=None, clean=False, draws=1)
    noisy = numpy.random.default_rng(0).normal(128, 20, (1, 40, 40)).astype(numpy.uint8)
    drawn = restore.restored(photo, noisy, request)
    assert drawn.noise == pytest.approx(20 / 256, rel=0.3)
    assert "estimated: 0.0" in drawn.summary()
    monkeypatch.setattr(sources, "MOST_WORKED", 100)
    with pytest.raises(UsageError, match="pixels must be 1 to 100"):
        restore.restored(photo, noisy, request)


def test_qualities_cost_what_the_room_says() -> None:
    assert restore.COSTS.keys() == QUALITIES.keys()
    for quality, (covariance, steps) in QUALITIES.items():
        products = getattr(covariance, "products", 0)
        assert restore.COSTS[quality] == steps * (1 + 2 * products)


def test_a_mask_is_painted_on_an_image_of_any_shape() -> None:
    stored = numpy.full((3, 20, 40), 255, numpy.uint8)
    canvas = restore.canvas(stored)
    half = canvas.shape[0] // 2
    assert (canvas[:half] == 255).all()
    assert (canvas[half:] == 128).all(), "below is no image"
    layer = numpy.zeros((*canvas.shape[:2], 4), numpy.uint8)
    layer[: half // 2, : half // 2] = 255
    mask = restore.painted_mask({"layers": [layer]}, (3, 20, 40))
    assert not mask[:10, :10].any()
    assert mask.sum() == 20 * 40 - 100


def test_what_draws_and_uncertainty_are_shown_as() -> None:
    small, large = (numpy.zeros((side, side, 3), numpy.uint8) for side in (32, 300))
    shown = pictures.stack("turns", [("draw 1", small), ("<2>", large)])
    assert shown.count("<img") == 2
    assert "image/png" in shown
    assert "image/jpeg" in shown
    assert "<2>" not in shown
    frame = pictures.stack("fades", [("mean", small)], (0.25, 0.5, 0.1, 0.2))
    assert "left:25.000%;top:50.000%;width:10.000%;height:20.000%" in frame


def test_sliders_offer_what_a_model_knows() -> None:
    assert image.sigma_control("mnist") | {"value": 0.5} == image.sigma_control("mnist")
    assert not image.sigma_control("mnist")["interactive"]
    for name in ("cifar10", "celeba"):
        bounds = image.sigma_control(name)
        assert bounds["interactive"]
        for end in ("minimum", "maximum", "value"):
            level_of(sources.model_of(name), bounds[end])


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


def test_of_several_states_the_last_is_seen() -> None:
    tell: Tell[int] = Tell()
    for i in range(3):
        tell(i)
    assert list(tell.latest) == [2]
    assert not tell.due(), "it has just been told"
    assert Tell(every=0.0).due()


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
