"""Training of MSD and FLASH from recorded sequences; see ``mmspec.distil.online``."""

from __future__ import annotations

from functools import partial

from mmspec.distil.online import OnlineLearner
from mmspec.vision.distil.objective import HiddenStateObjective

flash = partial(OnlineLearner, HiddenStateObjective(passes=1, loss="lk"))
msd = partial(OnlineLearner, HiddenStateObjective(passes=2, loss="lk"))
