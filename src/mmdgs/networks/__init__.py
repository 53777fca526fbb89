"""Networks: perceptron, U-Net, NCSNv2, a small classifier, a head of spectra."""

from mmdgs.networks.classifier import ConvClassifier
from mmdgs.networks.dropout import RowDropout, dropout_keys
from mmdgs.networks.ncsnv2 import NCSNv2
from mmdgs.networks.perceptron import ACTIVATIONS, MLP, PerceptronHessian
from mmdgs.networks.registry import NETWORKS, PRESETS, build_network, preset
from mmdgs.networks.residual_unet import ResidualUNet
from mmdgs.networks.unet import UNet

# fmt: off
__all__ = [
    "ACTIVATIONS", "MLP", "NETWORKS", "PRESETS", "ConvClassifier", "NCSNv2", "PerceptronHessian",
    "ResidualUNet", "RowDropout", "UNet", "build_network", "dropout_keys", "preset",
]
# fmt: on
