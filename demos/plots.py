"""SVG plots of an answer's statistics."""

from __future__ import annotations

from collections.abc import Sequence

from mmspec.engine.stats import Stats

_WIDTH, _HEIGHT = 360, 168
_LEFT, _BASE = 34, 128
_PHASES = {"prefill": "read prompt", "draft": "guess", "verify": "check", "commit": "store"}


def format_duration(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def histogram(counts: Sequence[int]) -> str:
    """Histogram of accepted draft tokens: ``counts[k]`` verify passes accepted k."""
    most = max(counts, default=0)
    if not most:
        return ""
    wide = (_WIDTH - _LEFT - 8) / len(counts)
    bar = min(wide * 0.7, 36)
    parts = []
    for accepted, count in enumerate(counts):
        x = _LEFT + (accepted + 0.5) * wide
        tall = 84 * count / most
        tooltip = f"{count} {'pass' if count == 1 else 'passes'} accepted {accepted}"
        parts.append(
            f'<g><title>{tooltip}</title><rect class="bar" x="{x - bar / 2:.1f}" y="{_BASE - tall:.1f}" '
            f'width="{bar:.1f}" height="{tall:.1f}" rx="2"/></g>'
        )
        if count:
            parts.append(f'<text class="value" x="{x:.1f}" y="{_BASE - tall - 5:.1f}">{count}</text>')
        if wide > 16 or accepted % 2 == 0:
            parts.append(f'<text class="tick" x="{x:.1f}" y="{_BASE + 16}">{accepted}</text>')
    axis = f'<line x1="{_LEFT - 8}" x2="{_WIDTH}" y1="{_BASE + 0.5}" y2="{_BASE + 0.5}"/>'
    label = f'<text class="tick" x="{(_WIDTH + _LEFT) / 2}" y="{_BASE + 36}">draft tokens accepted in a pass</text>'
    return _figure("Passes by accepted draft tokens", axis + "".join(parts) + label)


def time_split(stats: Stats) -> str:
    """Bar chart of the time of prefill, drafting, verification and commit."""
    times = {
        "prefill": stats.prefill_seconds,
        "draft": stats.draft_seconds,
        "verify": stats.verify_seconds,
        "commit": stats.commit_seconds,
    }
    total = sum(times.values())
    if not total:
        return ""
    parts = []
    longest = max(times.values())
    for row, (name, seconds) in enumerate(times.items()):
        y = 30 + row * 30
        wide = max(150 * seconds / longest, 1.5)
        label = f"{format_duration(seconds)} · {seconds / total:.0%}"
        parts.append(
            f'<text class="name" x="0" y="{y + 13}">{_PHASES[name]}</text>'
            f'<rect class="{name}" x="84" y="{y}" width="{wide:.1f}" height="18" rx="2"/>'
            f'<text class="label" x="{84 + wide + 8:.1f}" y="{y + 13}">{label}</text>'
        )
    return _figure(f"Time: {format_duration(total)}", "".join(parts))


def _figure(title: str, body: str) -> str:
    return (
        f'<svg class="mm-plot" role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}" aria-label="{title}">'
        f'<text class="title" x="0" y="14">{title}</text>{body}</svg>'
    )
