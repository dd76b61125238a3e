"""``mmspec train``: commands from the entry point group ``mmspec.train``."""

from mmspec.cli.commands import Commands

train = Commands("train", name="train", help="Train an embedded model or a drafter from nothing.")
