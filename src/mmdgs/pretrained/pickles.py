"""Pickles of torch, read for their tensors alone: nothing in them is run."""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch

from mmdgs.errors import UsageError
from mmdgs.files import read_file


def read_pickle(path: Path) -> Any:
    """What torch.save wrote, on the CPU: containers, numbers, text and tensors; a pickle that asks for more is refused.

    Old files (before torch 1.6) and new ones alike.
    """
    content = read_file(path)
    try:
        with warnings.catch_warnings():  # of unusual protocols, which are read or refused all the same
            warnings.simplefilter("ignore")
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "nsupported" in line), "it is no plain pickle")
        raise UsageError(
            f"{path} is refused, and nothing in it was run: it holds more than tensors, or is damaged "
            f"({reason.strip()}); only a checkpoint of plain tensors is read"
        ) from error
    except Exception as error:  # damaged files raise nearly anything
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(f"{path} is not a checkpoint of torch, or a damaged one: {reason}") from error
