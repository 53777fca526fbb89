"""The public names of mmdgs.metrics, and where each lives: read by __init__.py, too."""

from mmdgs.metrics.chains import (
    ModeCoverage as ModeCoverage,
    autocorrelations as autocorrelations,
    bulk_sample_sizes as bulk_sample_sizes,
    effective_sample_size as effective_sample_size,
    mode_coverage as mode_coverage,
    rank_rhat as rank_rhat,
)
from mmdgs.metrics.discrepancy import (
    kl_divergence as kl_divergence,
    mmd as mmd,
    score_ksd as score_ksd,
)
from mmdgs.metrics.draws import (
    calibration_ratio as calibration_ratio,
    coverage_of as coverage_of,
    crps as crps,
    psnr as psnr,
    ranks as ranks,
    ssim as ssim,
)
from mmdgs.metrics.frechet import (
    FeatureMoments as FeatureMoments,
    frechet_distance as frechet_distance,
)
from mmdgs.metrics.inception_file import Inception as Inception, load_inception as load_inception
from mmdgs.metrics.intervals import (
    extrapolated as extrapolated,
    interval as interval,
    jackknife_interval as jackknife_interval,
)
from mmdgs.metrics.judgement import Judgement as Judgement, judge as judge
from mmdgs.metrics.neighbours import (
    Diversity as Diversity,
    PrecisionRecall as PrecisionRecall,
    diversity as diversity,
    precision_recall as precision_recall,
)
from mmdgs.metrics.reports import (
    CalibrationReport as CalibrationReport,
    Reliability as Reliability,
    calibration_report as calibration_report,
    standardised as standardised,
)
from mmdgs.metrics.scores import (
    Spread as Spread,
    class_shares as class_shares,
    entropy as entropy,
    inception_score as inception_score,
    kernel_distance as kernel_distance,
    total_variation as total_variation,
)
