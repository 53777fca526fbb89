"""Experiments: one module per table or figure."""

from experiments.experiment import Context, Experiment, Outcome, TimeIsUp
from mmdgs.workspace import Workspace

EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "fig1",
            "Figure 1: posterior approximations",
            "True and approximate posteriors of a four-Gaussian mixture, with KL divergences.",
        ),
        Experiment(
            "table1",
            "Table 1: MMD of Gibbs chains on 2-D data",
            "Learned, isotropic, diagonal and full posteriors, and exact Gibbs, on three 2-D sets.",
            ("data", "seeds", "short_training"),
        ),
        Experiment(
            "fig2",
            "Figure 2: samples of single chains",
            "What one long chain draws, for each posterior and data set.",
            ("data", "seeds"),
        ),
        Experiment(
            "mnist",
            "MNIST: one noise level, three posteriors",
            "Losses, covariances, samples and calibration of diagonal, isotropic and learned "
            "posteriors (Figures 3-5, C.1).",
        ),
        Experiment(
            "many-levels",
            "Samplers over many noise levels, on exact mixtures",
            "Every sampler with an exact denoiser: distance from the target against cost.",
        ),
        Experiment(
            "inverse",
            "Conditioning on measurements: on exact mixtures, or on images with --model",
            "Exact mixtures with every covariance: gap to the optimal mean, calibration, coverage; "
            "held-out images restored with --model cifar10 or celeba.",
            ("images", "minutes", "model", "only"),
        ),
        Experiment(
            "particles",
            "Weighted particles: draws of p(x | y) that are exact in the limit",
            "Weights of modes, evidences and calibration on exact mixtures, by particles and by "
            "evaluations, beside sweeps, TDS and azula's solvers.",
            ("minutes", "only"),
        ),
        Experiment(
            "digs",
            "Metropolis-Gibbs on the 40 modes of Diffusive Gibbs Sampling",
            "Exact chains of a known density: MMD and modes with exact and with estimated moments, "
            "beside MALA and the numbers of Chen et al. (2024).",
            ("seeds", "only", "minutes"),
        ),
        Experiment(
            "few-steps",
            "Few-step sampling of a pretrained diffusion model",
            "Ancestral sampling with every covariance, DDIM, Heun and multistep: FID by steps.",
            ("model", "head", "images", "minutes", "only", "case"),
        ),
        Experiment(
            "probes",
            "Probes of a Jacobian's diagonal, compared",
            "Rademacher, Hadamard and lattice probes: the error of the diagonal against products, "
            "on MNIST and CIFAR-10.",
            ("model",),
        ),
        Experiment(
            "components",
            "Principal components of posteriors: cost and use",
            "Products for five components, and the share of held-out errors that they explain.",
            ("model", "images", "minutes", "only"),
        ),
        Experiment(
            "calibration",
            "Which covariance, and which uncertainty to trust",
            "Every estimator on images, 2-D data and digits: likelihood, standardised errors and "
            "coverage, with the paper's floor, by default, and after mmdgs.calibrate.",
            ("model", "many", "head", "images", "minutes", "only", "case"),
        ),
        Experiment(
            "covariances",
            "Which covariance makes images likely",
            "Likelihoods of held-out images under each covariance, over the levels of one model.",
            ("model", "images", "minutes", "only"),
        ),
        Experiment(
            "cifar10",
            "CIFAR-10: one noise level, Gibbs chains from noise",
            "FID against Gibbs steps and mode collapse of a score network at sigma 0.3.",
            ("model", "many", "classifier", "images", "minutes"),
        ),
        Experiment(
            "table2",
            "Langevin against Gibbs on one network, and all other samplers",
            "FID, precision, recall and diversity of samplers of one network, at the paper's "
            "settings and at equal cost.",
            ("model", "seeds", "images", "minutes", "only"),
        ),
        Experiment(
            "table2-seeds",
            "Table 2 with more images",
            "FIDs of up to 50,000 images, by more seeds, which several machines can share.",
            ("model", "most_images", "skip_seeds", "minutes", "only"),
        ),
        Experiment(
            "photographs",
            "Photographs: denoising, calibration, and where the error lies",
            "The denoiser of photographs beside FFDNet on a folder of images (--data-dir): PSNR, "
            "coverage, and the error that its map of uncertainty sets aside.",
            ("model", "ffdnet", "images", "minutes"),
        ),
        Experiment(
            "photo-restoration",
            "Photographs restored: beside azula's and deepinv's methods on the same network",
            "Super-resolution, blur, motion and missing pixels at two noise levels on a folder of "
            "images (--data-dir): CRPS, PSNR, calibration and cost.",
            ("model", "images", "minutes", "only", "case"),
        ),
        Experiment(
            "celeba",
            "Faces at 64x64 by Langevin dynamics and by Gibbs sampling",
            "Samples by both of the paper's algorithms, against CelebA or a zip of faces "
            "(--data-dir FILE.zip).",
            ("model", "images"),
        ),
    )
}
"""What `python -m experiments` knows, by name."""

__all__ = ["EXPERIMENTS", "Context", "Experiment", "Outcome", "TimeIsUp", "Workspace"]
