"""The readers of outside files: how a valid file is made, how it is mutated, and how it is read."""

from __future__ import annotations

import gzip
import io
import pickle
import shutil
import struct
import sys
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import mutations as m
from fakes import deep_png, fake_known, fake_script
from nets import tiny_model, tiny_pipeline
from toy_models import SHAPE, exact, many_level_model

import mmdgs
from mmdgs.cli.evaluate import _table
from mmdgs.data import load_images, load_samples
from mmdgs.data.single import NamedImage, named_images
from mmdgs.diagnostics import diagnose, read_chain, read_draws
from mmdgs.errors import UsageError
from mmdgs.evaluation import read_evaluations
from mmdgs.evaluation.record import Evaluation, Images
from mmdgs.files import to_json
from mmdgs.metrics import inception_file, judge
from mmdgs.models import Model, ModelConfig
from mmdgs.models.conversion import convert_checkpoint
from mmdgs.models.fits import FitStore
from mmdgs.models.shipped import licence_of
from mmdgs.networks import NCSNv2
from mmdgs.noise import LevelTable
from mmdgs.operators.named import parse_operator
from mmdgs.sampling import SamplerSettings, generate, make_plan
from mmdgs.sampling.writers import Destination
from mmdgs.schedules import parse_levels
from mmdgs.training import Recipe, TrainingSettings, read_recipe, train_model
from mmdgs.training.recipe import parse_override
from mmdgs.uncertainty.folder import PosteriorFolder
from mmdgs.workspace import Part, Workspace

SHAPE_8 = (1, 8, 8)


@dataclass(frozen=True)
class Reader:
    """`make` writes valid files into a folder, `files` are those to mutate, by pattern, and `read`
    reads them.

    A reader that `writes` gets a fresh copy of the folder for each case.
    """

    name: str
    make: Callable[[Path], object]
    files: dict[str, m.Mutate]
    read: Callable[[Path], object]
    writes: bool = False
    optional: str = ""  # a package that it needs
    typed: bool = False  # no file, but what a user types


def perceptron(folder: Path) -> None:
    config = ModelConfig(
        "mlp", "mean-std", (2,), {"width": 4, "depth": 1}, sigma=0.5, isotropic_variance=0.1
    )
    Model.build(config).save_pretrained(folder / "mlp")


def models(folder: Path) -> None:
    perceptron(folder)
    tiny_model().save_pretrained(folder / "unet")
    many_level_model(SHAPE_8).save_pretrained(folder / "levels")
    options = {"width": 4, "features": 4}
    classes = {"network": "classifier", "options": options, "sigma": None, "classes": ("a", "b")}
    tiny_model("classes", (1, 16, 16), **classes).save_pretrained(folder / "classes")


def load_each(folder: Path) -> None:
    """The one model that is not as it was; the others are read for nothing."""
    changed = max(folder.glob("*/*"), key=lambda path: path.lstat().st_mtime_ns).parent
    mmdgs.load(changed)
    licence_of(changed)


def shards(folder: Path) -> None:
    config = ModelConfig("mlp", "energy", (2,), {"width": 8, "depth": 2}, sigma=0.5)
    Model.build(config).save_pretrained(folder, shard_mb=0.0003)


@cache
def fit_model() -> Model:
    options = {**tiny_model().config.options, "conditional": True}
    return tiny_model(sigma=None, sigmas=(2.0, 1.0, 0.5), param="clean", options=options)


def kept_fit(folder: Path, kind: str) -> FitStore:
    model = fit_model()
    model.folder = folder
    return FitStore(model, kind)


def make_fit(folder: Path, kind: str) -> None:
    store = kept_fit(folder, kind)
    values = torch.rand(3, *store.shapes[-1], generator=torch.Generator().manual_seed(0)) + 0.1
    key = {"data": "a", "images": 3, "seed": 0, "of": "errors"}
    store.write(folder / f"{kind}.safetensors", key, LevelTable([0.5, 1.0, 2.0], values))


def read_fit(folder: Path, kind: str) -> None:
    """A damaged fit is left aside; one that is taken must be positive and finite."""
    table = kept_fit(folder, kind).best_of()
    if table is None:  # the log names the file
        raise UsageError(f"{folder} holds no fit that can be used")
    assert table.values.isfinite().all()
    assert (table.values > 0).all()


def ncsnv2(folder: Path, new: bool) -> None:
    state = {f"module.{key}": value for key, value in NCSNv2(1, width=2).state_dict().items()}
    state["module.sigmas"] = torch.tensor([2.0, 1.0, 0.1])
    average = {key: value for key, value in state.items() if "sigmas" not in key}
    content = [state, {"step": 3}, 1, 2, average] if new else state
    torch.save(content, folder / "a.pth", _use_new_zipfile_serialization=new)


def in_checkpoint(name: str) -> m.Mutate:
    return m.of_pickle if name.endswith(".pkl") else m.of_bytes


def pipeline(folder: Path) -> None:
    tiny_pipeline().save_pretrained(folder / "tiny")


def run_pipeline(folder: Path) -> None:
    model = mmdgs.load(folder / "tiny")
    if model.shape[-1] <= 64:
        model(torch.zeros(1, *model.shape), model.levels[len(model.levels) // 2])


def pickled_pipeline(folder: Path) -> None:
    pipeline(folder)
    unet = folder / "tiny" / "unet"
    state = tiny_pipeline().unet.state_dict()
    torch.save({key: state[key] for key in list(state)}, unet / "diffusion_pytorch_model.bin")
    (unet / "diffusion_pytorch_model.safetensors").unlink()


def convert(folder: Path) -> None:
    convert_checkpoint(folder / "tiny", folder / "out")


def npz(folder: Path) -> None:
    x = np.random.default_rng(0).random((2, 3, 4, 4), dtype=np.float32)
    np.savez(folder / "float.npz", x=x)
    pixels = (x.transpose(0, 2, 3, 1) * 255).astype(np.uint8)
    np.savez_compressed(folder / "pixels.npz", arr_0=pixels, y=np.arange(2))


def chains_and_draws(folder: Path) -> None:
    rng = np.random.default_rng(0)
    chain = {"samples": rng.random((20, 2, 2)), "modes": np.eye(2), "weights": np.ones(2)}
    np.savez(folder / "chain.npz", **chain)
    draws = {"draws": rng.random((5, 20)), "truth": rng.random(20), "task": np.arange(20) // 10}
    np.savez_compressed(folder / "draws.npz", **draws)


def read_chains_and_draws(folder: Path) -> None:
    chain = read_chain(folder / "chain.npz")
    diagnose(chain["samples"], chain.get("modes"), chain.get("weights"))
    for pair in read_draws(folder / "draws.npz").values():
        judge(*pair)


def idx(folder: Path, packed: bool) -> None:
    images = struct.pack(">4I", 2051, 3, 4, 5) + bytes(range(60))
    labels = struct.pack(">2I", 2049, 3) + bytes([7, 0, 9])
    for name, content in (("train-images-idx3-ubyte", images), ("train-labels-idx1-ubyte", labels)):
        (folder / name).write_bytes(gzip.compress(content) if packed else content)


def cifar_batch() -> bytes:
    data = np.random.default_rng(0).integers(0, 256, (2, 3072), dtype=np.uint8)
    return pickle.dumps({b"data": data, b"labels": [3, 9]}, 4)


def cifar(folder: Path) -> None:
    (folder / "test_batch").write_bytes(cifar_batch())


def cifar_archive(folder: Path) -> None:
    with tarfile.open(folder / "cifar-10-python.tar.gz", "w:gz") as tar:
        content = cifar_batch()
        member = tarfile.TarInfo("cifar-10-batches-py/test_batch")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))


def pictures(folder: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 8, 3), dtype=np.uint8)
    (folder / "set").mkdir()
    for name in ("png", "jpg", "gif", "tiff", "webp", "bmp", "ppm"):
        Image.fromarray(pixels).save(folder / "set" / f"{name}.{name}")
    Image.fromarray(pixels.astype(np.uint16)[..., 0] * 200).save(folder / "set" / "deep.png")


def picture_zip(folder: Path) -> None:
    pictures(folder)
    with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted((folder / "set").iterdir()):
            archive.write(file, f"inner/{file.name}")
    shutil.rmtree(folder / "set")


def npy(folder: Path) -> None:
    np.save(folder / "float.npy", np.random.default_rng(0).random((9, 8, 3)))
    np.save(folder / "pixels.npy", np.arange(72, dtype=np.uint8).reshape(9, 8))


def deep_pictures(folder: Path) -> None:
    grey = np.random.default_rng(0).integers(0, 1 << 16, (9, 8), dtype=np.uint16)
    Image.fromarray(grey).save(folder / "grey.png")
    Image.fromarray(grey).save(folder / "grey.tiff")
    Image.fromarray((grey / 65536).astype(np.float32)).save(folder / "float.tiff")
    Image.fromarray(np.stack([grey >> 8] * 4, -1).astype(np.uint8)).save(folder / "alpha.png")
    (folder / "colour.png").write_bytes(deep_png(np.stack([grey] * 3, -1)))


def read_single(folder: Path) -> None:
    for image in named_images([str(file) for file in sorted(folder.iterdir())]):
        assert image.image.isfinite().all()


def posterior_record(folder: Path) -> None:
    for name in ("out/digit", "victim"):
        (folder / name).mkdir(parents=True)
        (folder / name / "page.html").write_text("page")
    settings = {"count": 1, "names": ["digit"], "sigma": 0.5}
    (folder / "out" / "posterior.json").write_bytes(
        to_json({"mmdgs_samples": 1, "finished": True, "settings": settings})
    )


def overwrite_posteriors(folder: Path) -> None:
    place = PosteriorFolder(folder / "out", [NamedImage("other", torch.zeros(1, 8, 8))])
    try:
        with place.held():
            place.begin({"count": 1}, resume=False, overwrite=True)
    finally:
        assert (folder / "victim" / "page.html").exists()


def celeba(folder: Path) -> None:
    (folder / "img_align_celeba").mkdir()
    for i in range(3):
        Image.new("RGB", (178, 218), (i, 50, 90)).save(
            folder / "img_align_celeba" / f"00000{i}.jpg"
        )
    (folder / "list_eval_partition.txt").write_text("000000.jpg 0\n000001.jpg 1\n000002.jpg 2\n")


def mask(folder: Path) -> None:
    Image.fromarray((np.arange(64).reshape(8, 8) * 4).astype(np.uint8)).save(folder / "mask.png")


RECIPE = """data: mog
model: mlp
network: {width: 4, depth: 1}
param: energy
levels: geometric:5:2:0.1
weighting: ncsnv2
steps: 10
batch_size: 8
learning_rate: 1e-3
ema: 0.9
watch: none
"""
TOML = """data = "mog"
model = "mlp"
sigma = 0.5
steps = 10
learning_rate = 1e-3
[network]
width = 4
"""


def recipe(folder: Path) -> None:
    (folder / "a.yaml").write_text(RECIPE.replace("watch: none\n", ""))


def inception(folder: Path, script: bool) -> None:
    inception_file.KNOWN = fake_known()
    if script:
        fake_script(folder / "a.pt", head=True)
    else:
        torch.save({"scale": torch.tensor(1.0)}, folder / "a.pth")


def evaluations(folder: Path) -> None:
    images = Images("a", "samples", 10, 20, "0" * 64)
    values = {
        "fid": 3.0,
        "kid": {"mean": 0.1, "std": 0.1},
        "diversity": {"ratio": None, "samples": {"duplicates": 0.0}},
    }
    one = Evaluation(images, images, values, seed=1, left_out={"fid": [1.0, 2.0]}).to_json()
    (folder / "a.json").write_bytes(to_json({"evaluations": [one, one]}))


@cache
def sampled() -> tuple[Model, Any]:
    model = exact()
    return model, make_plan(SamplerSettings("ddim", steps=2), model)


def samples(folder: Path, name: str, finished: bool) -> None:
    """Samples in a folder or file, or what a run leaves that is stopped before the last of them is
    written.
    """
    write = Destination.write

    def stopping(place: Destination, first: int, *rest: Any) -> None:
        if first >= 4 and not finished:
            raise KeyboardInterrupt
        write(place, first, *rest)

    Destination.write = stopping  # type: ignore[method-assign]
    try:
        resume_samples(folder, name)
    except KeyboardInterrupt:
        return
    finally:
        Destination.write = write  # type: ignore[method-assign]


def resume_samples(folder: Path, name: str) -> None:
    model, plan = sampled()
    start = torch.zeros(6, *SHAPE)
    generate(
        model, plan, 6, out=folder / name, batch_size=2, progress=None, resume=True, start=start
    )


def small_recipe(steps: int) -> Recipe:
    options = {"batch_size": 4, "checkpoint_every": 1, "validate_every": None, "ema": 0.9}
    settings = TrainingSettings(steps=steps, **options)
    network = {"width": 2, "depth": 1}
    return Recipe(data="mog", model="mlp", network=network, sigma=0.5, limit=16, training=settings)


def training(folder: Path) -> None:
    train_model(small_recipe(2), folder / "run", progress=None)


def resume_training(folder: Path) -> None:
    train_model(small_recipe(2), folder / "run", progress=None, resume=True)


def workspace(folder: Path) -> None:
    place = Workspace(folder / "out")
    place.part("a", {"b": 1}, lambda: Part({"c": 2.0}, {"x": torch.ones(3)}))
    place.write_json(
        "records.json", {"environment": {"mmdgs": "0"}, "figures": ["a.png"], "values": [1.0]}
    )
    place.write("a.png", b"png")
    place.close()


def read_workspace(folder: Path) -> None:
    place = Workspace(folder / "out", resume=True)
    found = place.part("a", {"b": 1}, lambda: Part({"c": 2.0}, {"x": torch.ones(3)}))
    assert torch.equal(found.tensors["x"], torch.ones(3))
    place.close()
    Workspace(folder / "out", overwrite=True).close()


def words(folder: Path) -> None:
    (folder / "words.txt").write_text(
        "geometric:232:50:0.01\nsteps=10\nbox:4\nblur:1.5\nmotion:3\n"
    )


def read_words(folder: Path) -> None:
    """What is typed on the command line, in a file for once."""
    lines = (folder / "words.txt").read_bytes().decode("latin1").split("\n")
    operator = partial(parse_operator, shape=SHAPE_8)
    for parse, line in zip(
        (parse_levels, parse_override, operator, operator, operator), lines, strict=False
    ):
        parse(line)


def load_set(folder: Path, data: str, split: str = "train") -> None:
    load_images(data, split, data_dir=folder, download=False)


load_cifar = partial(load_set, data="cifar10", split="test")


def skipping(folder: Path, name: str) -> None:
    load_images(folder / name, "train", size=8, unreadable="skip")
    load_images(folder / name, "test", size=8)


READERS = [
    Reader("config.json", models, {"*/config.json": m.of_json}, load_each),
    Reader("model.safetensors", models, {"*/model.safetensors": m.of_safetensors}, load_each),
    Reader("shards", shards, {"*.index.json": m.of_json, "model-*": m.of_safetensors}, mmdgs.load),
    Reader("README.md", perceptron, {"*/README.md": m.of_card}, load_each),
    *(Reader(f"{kind} fit", partial(make_fit, kind=kind), {"*.safetensors": m.of_safetensors},
             partial(read_fit, kind=kind))
      for kind in ("isotropic", "spectral", "calibration-full")),
    Reader("NCSNv2 .pth", partial(ncsnv2, new=True), {"a.pth": m.in_zip(in_checkpoint)},
           lambda f: mmdgs.load(f / "a.pth")),
    Reader("NCSNv2 .pth, old", partial(ncsnv2, new=False), {"a.pth": m.of_pickle},
           lambda f: mmdgs.load(f / "a.pth", ema=False)),
    Reader("diffusers configurations", pipeline, {"tiny/*/*.json": m.of_json,
           "tiny/*.json": m.of_json}, run_pipeline, optional="diffusers"),
    Reader("diffusers weights", pipeline, {"tiny/unet/*.safetensors": m.of_safetensors},
           lambda f: mmdgs.load(f / "tiny"), optional="diffusers"),
    Reader("diffusers .bin", pickled_pipeline, {"tiny/unet/*.bin": m.in_zip(in_checkpoint)},
           convert, writes=True, optional="diffusers"),
    Reader("npz", npz, {"*.npz": m.in_zip(lambda _: m.of_npy)},
           lambda f: [load_samples(file) for file in sorted(f.iterdir())]),
    Reader("chains and draws", chains_and_draws, {"*.npz": m.in_zip(lambda _: m.of_npy)},
           read_chains_and_draws),
    Reader("idx", partial(idx, packed=False), {"*": m.of_bytes}, partial(load_set, data="mnist")),
    Reader("idx.gz", partial(idx, packed=True), {"*": m.in_gzip(m.of_bytes)},
           partial(load_set, data="mnist")),
    Reader("CIFAR-10 pickles", cifar, {"*": m.of_pickle}, load_cifar),
    Reader("CIFAR-10 tar.gz", cifar_archive, {"*": m.in_gzip(m.in_tar(m.of_pickle))}, load_cifar),
    Reader("image files", pictures, {"set/*": m.of_png}, partial(skipping, name="set")),
    Reader("zip of images", picture_zip, {"a.zip": m.in_zip(lambda _: m.of_png)},
           partial(skipping, name="a.zip")),
    Reader("npy image", npy, {"*.npy": m.of_npy}, read_single),
    Reader("single images", deep_pictures, {"*": m.of_png}, read_single),
    Reader("posterior record", posterior_record, {"out/posterior.json": m.of_json},
           overwrite_posteriors, writes=True),
    Reader("CelebA partition", celeba, {"*.txt": m.of_lines}, partial(load_set, data="celeba")),
    Reader("PNG mask", mask, {"mask.png": m.of_png},
           lambda f: parse_operator(str(f / "mask.png"), SHAPE_8)),
    Reader("YAML recipe", recipe, {"a.yaml": m.of_yaml},
           lambda f: read_recipe(f / "a.yaml").command()),
    Reader("TOML recipe", lambda f: (f / "a.toml").write_text(TOML), {"*": m.of_lines},
           lambda f: read_recipe(f / "a.toml")),
    Reader("Inception state dict", partial(inception, script=False),
           {"a.pth": m.in_zip(in_checkpoint)},
           lambda f: inception_file.load_inception(f / "a.pth")),
    Reader("Inception TorchScript", partial(inception, script=True),
           {"a.pt": m.in_zip(in_checkpoint)}, lambda f: inception_file.load_inception(f / "a.pt")),
    Reader("evaluations", evaluations, {"a.json": m.of_json},
           lambda f: _table(read_evaluations(f / "a.json"))),
    Reader("samples, begun", partial(samples, name="out", finished=False),
           {"out/samples.json": m.of_json, "out/.parts/*.json": m.of_json},
           partial(resume_samples, name="out"), writes=True),
    Reader("samples in parts", partial(samples, name="x.npz", finished=False),
           {"x.samples.json": m.of_json, ".x.npz.parts/*.json": m.of_json,
            ".x.npz.parts/*.npy": m.of_npy}, partial(resume_samples, name="x.npz"), writes=True),
    Reader("samples, finished", partial(samples, name="x.npz", finished=True),
           {"x.samples.json": m.of_json}, partial(resume_samples, name="x.npz"), writes=True),
    Reader("training checkpoint", training, {"run/checkpoints/last/state.json": m.of_json,
           "run/checkpoints/last/*.safetensors": m.of_safetensors,
           "run/metrics.jsonl": m.of_json_lines}, resume_training, writes=True),
    Reader("parts of an experiment", workspace, {"out/parts/*.json": m.of_json,
           "out/parts/*.safetensors": m.of_safetensors, "out/records.json": m.of_json},
           read_workspace, writes=True),
    Reader("command-line values", words, {"words.txt": m.of_lines}, read_words, typed=True),
]  # fmt: skip
"""All readers. A new reader of outside files is placed here."""

warnings.simplefilter("ignore")
