"""The public names of mmdgs.training: read by type checkers, and by __init__.py."""

from mmdgs.training.checkpoint import (
    RunFolder as RunFolder,
    last_step as last_step,
    metrics as metrics,
)
from mmdgs.training.examples import (
    Examples as Examples,
    ImageExamples as ImageExamples,
    TensorExamples as TensorExamples,
)
from mmdgs.training.loop import (
    Trained as Trained,
    Trainer as Trainer,
    Validation as Validation,
    train as train,
)
from mmdgs.training.objective import level_draw as level_draw, loss_of as loss_of
from mmdgs.training.recipe import (
    Recipe as Recipe,
    TrainingSettings as TrainingSettings,
    read_recipe as read_recipe,
)
from mmdgs.training.run import train_model as train_model
from mmdgs.training.stopping import Interrupted as Interrupted
from mmdgs.training.untrained import new_model as new_model
