"""The list of photographs itself."""

import re

from mmspec.eval.pictures.judging import names
from mmspec.eval.pictures.picture import photograph_packages
from mmspec.vision.pictures.fetching import COMMANDS

TRAINED_ON = {"tuxpaint-stamps-default", "openclipart-png", "openmoji", "fluent-emoji"}


def test_the_list():
    packages = photograph_packages()
    pictures = [one for package in packages for one in package.pictures]
    assert len(pictures) == len({one.name for one in pictures}) == len({one.sha256 for one in pictures}) == 60
    assert {package.manager for package in packages} == set(COMMANDS)
    assert not TRAINED_ON & {package.name for package in packages}
    assert len({package.slug for package in packages}) == len(packages)
    for one in pictures:
        assert re.fullmatch("[0-9a-f]{64}", one.sha256)
        assert re.fullmatch(r"[a-z-]+\.(?:webp|jpg|png|gif)", one.file)
        assert one.names
        assert one.group
        assert one.licence
        assert not {*one.names} & {*one.kinds}
        assert all(names(f"Here is a {word}.", (word,)) for word in (*one.names, *one.kinds))


def test_the_groups_are_spread():
    groups = [one.group for package in photograph_packages() for one in package.pictures]
    assert len(set(groups)) == 10
    assert max(map(groups.count, groups)) <= 15
