"""``mmspec train``: commands from the plug-ins ``train``."""

from mmspec.cli.commands import Commands

train = Commands("train", name="train", help="Train an embedded model or a drafter from nothing.")
