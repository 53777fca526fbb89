"""Denoisers of others: networks against what is known of them, files, and measured cells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from image_experiments import performed
from nets import lively, random_images, save_pictures
from sizes import unpaint
from torch import Tensor, nn

from experiments import Context, Workspace, denoisers, dncnn
from experiments.denoisers import KINDS, KRYLOV, LOW_RANK, STORED
from experiments.dncnn import DnCNN, Scale, UNet, load_blind, load_scico
from mmdgs.errors import UsageError
from mmdgs.jacobians import linearised
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import seeded

PLACE = Path("clone", "pretrained", "dncnn", "bias_free", "0-100.pt")
KEPT = PLACE.parents[3] / "precomputed"


def grey(n: int, side: int) -> Tensor:
    return torch.rand(n, 1, side, side, generator=seeded(0))


def stored(network: nn.Module, file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": [lively(network).state_dict()], "step": 1}, file)
    return file


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """DnCNNs of four layers."""
    monkeypatch.setattr(dncnn, "LAYERS", 4)


@pytest.mark.usefixtures("short")
def test_networks_without_biases_follow_the_size_of_their_input(tmp_path: Path) -> None:
    """D(2 x) = 2 D(x), and D(x) = J x; with biases neither."""
    x, level = grey(2, 8), NoiseLevel(sigma=0.1)
    networks = {
        "scaled": DnCNN(4, Scale), "unet": UNet(), "biased": DnCNN(4, nn.BatchNorm2d, bias=True),
    }  # fmt: skip
    for name, network in networks.items():
        denoiser = load_blind(stored(network, tmp_path / f"{name}.pt"))
        at = linearised(denoiser, x, level)
        mean, along = at.mean, (2 * at.symmetric(x[None]) - at.pull(x[None]))[0]
        same = torch.allclose(denoiser(2 * x, level), 2 * mean, atol=1e-5)
        assert same == torch.allclose(along, mean, atol=1e-5) == (name != "biased"), name
        halved = NoiseLevel(alpha=0.5, sigma=0.05)
        torch.testing.assert_close(denoiser(0.5 * x, halved), mean)


@pytest.mark.usefixtures("short")
def test_a_file_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    file = stored(DnCNN(3, Scale), tmp_path / "short.pt")
    with pytest.raises(UsageError, match="lacks 3 weights of the network, such as hidden_layer"):
        load_blind(file)


@pytest.mark.parametrize("told", [False, True])
def test_networks_of_scico_go_around_the_edge_and_may_be_told_sigma(
    told: bool, tmp_path: Path
) -> None:
    msgpack = pytest.importorskip("msgpack")
    network = lively(DnCNN(4, nn.BatchNorm2d, told=told, padding="circular")).eval()
    own = network.state_dict()

    def packed(value: object) -> object:
        assert isinstance(value, Tensor)
        array = (list(value.shape), "float32", value.contiguous().numpy().tobytes())
        return msgpack.ExtType(dncnn.ARRAY, msgpack.packb(array))

    def kernel(name: str) -> dict[str, Tensor]:
        return {"kernel": own[f"{name}.weight"].permute(2, 3, 1, 0)}

    parts = {"conv_start": kernel("first_layer"), "conv_end": kernel("last_layer")}
    statistics = {}
    for i in range(2):
        norm = {key: own[f"bn_layer_list.{i}.{key}"] for key in ("weight", "bias")}
        scaled = {"scale": norm["weight"], "bias": norm["bias"]}
        parts[f"ConvBNBlock_{i}"] = {
            "Conv_0": kernel(f"hidden_layer_list.{i}"),
            "BatchNorm_0": scaled,
        }
        moving = {of: own[f"bn_layer_list.{i}.running_{of}"] for of in ("mean", "var")}
        statistics[f"ConvBNBlock_{i}"] = {"BatchNorm_0": moving}
    content = {"params": parts, "batch_stats": statistics}
    (tmp_path / "a.mpk").write_bytes(msgpack.packb(content, default=packed))
    denoiser, x, level = load_scico(tmp_path / "a.mpk"), grey(2, 8), NoiseLevel(sigma=0.1)
    mean = denoiser(x, level)
    torch.testing.assert_close(mean, network(x, *([0.1] if told else [])))
    torch.testing.assert_close(denoiser(x.roll(3, -1), level), mean.roll(3, -1))
    other = denoiser(x, NoiseLevel(sigma=0.2))
    assert (not torch.equal(mean, other)) == told


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: None) -> Context:
    """Photographs, one network with the Jacobian of its noise at one image, and few crops."""
    unpaint(monkeypatch)
    images = (random_images(1, (3, 14, 13), seed=i)[0] for i in range(16))
    folder = save_pictures(tmp_path / "photos", images, (f"{i:02}" for i in range(16)))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = DnCNN(4, Scale)
    file = stored(network, tmp_path / PLACE)
    network.last_layer.weight.data *= -0.1  # little is taken off: no worse than nothing
    torch.save({"model": [network.state_dict()]}, file)
    (tmp_path / KEPT).mkdir()
    denoiser: Any = load_blind(file)
    denoiser.network.double()
    x, level = grey(1, 6).double(), NoiseLevel(sigma=0.1)
    jacobian = torch.autograd.functional.jacobian(lambda x: denoiser(x, level), x).reshape(36, 36)
    arrays = {"Jacobian": torch.eye(36) - jacobian, "noisy_im": x[0, 0]}
    arrays |= {"im_denoised": denoiser(x, level)[0, 0]}
    for name, array in arrays.items():
        numpy.save(tmp_path / KEPT / f"{name}_30.npy", array.detach().numpy())
    tiny = replace(denoisers.QUICK, side=12, krylov=(STORED,))
    return Context(
        Workspace(tmp_path / "out"), torch.device("cpu"), quick=True, settings=tiny,
        data_dir=str(folder), weights_dir=str(tmp_path / PLACE.parts[0]),
    )  # fmt: skip


def test_what_is_there_is_judged_and_its_products_are_those_of_the_stored_matrix(
    prepared: Context,
) -> None:
    records, report = performed("denoisers", prepared)
    judged = {cell["case"]: cell for cell in records["posteriors"]}
    assert {cell["row"] for cell in records["posteriors"]} == {STORED}
    assert set(judged) == set(KINDS)
    counts = dict.fromkeys(KINDS, (4, 8)) | {LOW_RANK: (4, 8), KRYLOV: (4, 8)}
    assert {kind: (c["fitted to"], c["judged by"]) for kind, c in judged.items()} == counts
    (cell,) = records["stored"]
    assert cell["case"] == 30
    for key in ("v'J", "Jv", "mean"):
        assert cell[key] < 1e-9, key
    (seen,) = records["jacobians"]
    assert seen["asymmetry"] > 0
    assert {"blind off", "patches off"} <= set(seen)
    assert "FFDNet, colour" in report.sections[0].text[1]


def test_without_any_file_it_says_what_is_sought(prepared: Context, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match=r"must hold one of ffdnet_color\.pth"):
        performed("denoisers", replace(prepared, weights_dir=str(tmp_path / "none")))
