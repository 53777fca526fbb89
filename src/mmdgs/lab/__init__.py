"""Experiments: one module per table or figure. This package is imported without torch and the extra `mmdgs[lab]`."""

from typing import TYPE_CHECKING, Any

from mmdgs.errors import unknown_name
from mmdgs.lab.experiment import Context, Experiment, Outcome, TimeIsUp

if TYPE_CHECKING:
    from mmdgs.lab.workspace import Workspace

EXPERIMENTS = {
    one.name: one
    for one in (
        Experiment(
            "fig1",
            "Figure 1: posterior approximations",
            "True and approximate denoising posteriors of a four-Gaussian mixture, with their KL divergences.",
        ),
        Experiment(
            "table1",
            "Table 1: MMD of Gibbs chains on 2-D data",
            "Learned, isotropic, diagonal and full posteriors, and exact Gibbs, on three 2-D data sets.",
            options=("data", "seeds", "short_training"),
        ),
        Experiment(
            "fig2",
            "Figure 2: samples of single chains",
            "What one long chain draws, for each posterior and data set.",
            options=("data", "seeds"),
        ),
        Experiment(
            "theory",
            "The theorems in numbers",
            "The covariance identity, the closest Gaussian, the Fisher identity, the existence of a clean model and "
            "the bound on the marginal KL, checked in float64 where posteriors are known.",
        ),
        Experiment(
            "mnist",
            "MNIST: one noise level, three posteriors",
            "Losses, covariances, samples and calibration of diagonal, isotropic and learned posteriors "
            "(Figures 3-5, C.1).",
        ),
        Experiment(
            "many-levels",
            "Samplers over many noise levels, on exact mixtures",
            "Langevin, Gibbs, consistent annealing, ancestral sampling, DDIM, Heun and multistep with an exact "
            "denoiser.",
        ),
        Experiment(
            "inverse",
            "Conditioning on measurements: on exact mixtures, or on images with --model",
            "Exact mixtures with every covariance and the exact posterior: gap to the optimal mean, calibration and "
            "coverage of the draws. With --model cifar10 or celeba: held-out images, restored with that network.",
            options=("images", "minutes", "model", "only"),
        ),
        Experiment(
            "digs",
            "Metropolis-Gibbs on the 40 modes of Diffusive Gibbs Sampling",
            "Chains that are exact, since the density is known: MMD, modes and evaluations with exact and with "
            "estimated moments, beside MALA at equal cost and the figures of Chen et al. (2024).",
            options=("seeds", "only", "minutes"),
        ),
        Experiment(
            "few-steps",
            "Few-step sampling of a pretrained diffusion model",
            "Ancestral sampling with fixed, isotropic, spectral, modulated, diagonal, low-rank and full covariances, "
            "DDIM, Heun and multistep: FID against steps.",
            options=("model", "head", "images", "minutes", "only", "case"),
        ),
        Experiment(
            "probes",
            "Probes of a Jacobian's diagonal, compared",
            "Rademacher, Hadamard and lattice probes: the error of the diagonal against products, on MNIST and "
            "CIFAR-10.",
            options=("model",),
        ),
        Experiment(
            "ocm",
            "A learned diagonal covariance against probes",
            "Optimal covariance matching (Ou et al., 2024): a small head against 1, 3 and 10 products with the "
            "Jacobian and an isotropic variance, in error, likelihood and calibration (20 minutes on a CPU).",
            options=("model", "head", "images"),
        ),
        Experiment(
            "covariances",
            "Which covariance: the likelihood of held-out images",
            "Isotropic, diagonal, spectral, modulated and full (Krylov) covariances of one network, by the likelihood "
            "of held-out images under the posteriors of their noisy versions, level by level.",
            options=("model", "images", "minutes", "only"),
        ),
        Experiment(
            "components",
            "Principal components of posteriors: cost and use",
            "Products that block Lanczos and subspace iteration take for five components, and the share of held-out "
            "errors that they explain, beside random directions and cosines.",
            options=("model", "images", "minutes", "only"),
        ),
        Experiment(
            "calibration",
            "Which uncertainty to trust",
            "Every estimator of the covariance on images, 2-D data and digits: likelihood, variance of standardised "
            "errors and coverage, with the paper's floor, by default, and after mmdgs.calibrate.",
            options=("model", "many", "head", "images", "minutes", "only", "case"),
        ),
        Experiment(
            "cifar10",
            "CIFAR-10: one noise level, Gibbs chains from noise",
            "Covariances by 1, 10 and 100 probes, chains every 10 steps, FID against Gibbs steps, and mode collapse of "
            "a score network at sigma 0.3.",
            options=("model", "many", "classifier", "images", "minutes"),
        ),
        Experiment(
            "table2",
            "Langevin against Gibbs on one network, and all other samplers",
            "The paper's Table 2: FID, precision, recall and diversity of samplers of one network with intervals over "
            "seeds, at the paper's settings and at equal cost; FID against network evaluations.",
            options=("model", "seeds", "images", "most_images", "skip_seeds", "minutes", "only"),
        ),
        Experiment(
            "network",
            "Every table of one network of CIFAR-10",
            "covariances, calibration, few-steps, inverse and table2 of one network, the cheapest first, each in a "
            "folder of its own; says what is open for --resume, and the command that takes the rest into the docs.",
            options=("model", "most_images", "skip_seeds", "minutes"),
        ),
        Experiment(
            "celeba",
            "Faces at 64x64 by Langevin dynamics and by Gibbs sampling",
            "Samples of a model of faces by both of the paper's algorithms, with FID and diversity against CelebA or a "
            "zip of faces (--data-dir FILE.zip).",
            options=("model", "images"),
        ),
    )
}
"""What `mmdgs reproduce` knows, by name."""

DEMO = Experiment(
    "demo",
    "mmdgs in two minutes",
    "Figure 1, Table 1 on the rings and Figure 2 of the paper, and digits, at a small size.",
)


def experiment(name: str) -> Experiment:
    """An experiment by name."""
    if name not in EXPERIMENTS:
        raise unknown_name("experiment", name, EXPERIMENTS)
    return EXPERIMENTS[name]


def __getattr__(name: str) -> Any:
    """Workspace is imported when it is first used: it needs torch."""
    if name != "Workspace":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mmdgs.lab.workspace import Workspace

    return Workspace


__all__ = ["DEMO", "EXPERIMENTS", "Context", "Experiment", "Outcome", "TimeIsUp", "Workspace", "experiment"]
