"""Training of MSD and FLASH from recorded sequences; see ``mmspec.training.online``."""

from __future__ import annotations

from functools import partial

from mmspec.training.online import OnlineLearner
from mmspec.vision.training.objective import HiddenStateObjective

flash = partial(OnlineLearner, HiddenStateObjective(passes=1, loss="lk"))
msd = partial(OnlineLearner, HiddenStateObjective(passes=2, loss="lk"))
