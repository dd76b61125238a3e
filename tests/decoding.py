"""Decoding step by step, by an engine of its own."""

from mmspec.engine.engine import Engine


def decode(target, drafter, prompt, sampler, stopper, budget, **settings):
    """The sequences of a prompt after each step; ``emitted`` of each holds its tokens of this step."""
    engine = Engine(target, drafter, lambda batch, nodes: budget, **settings)
    rows = engine.add(prompt, sampler, stopper)
    try:
        while alive := [row for row in rows if not row.done]:
            engine.wait(lambda alive=alive: any(row.has_output for row in alive))
            for row in rows:
                if row.error:
                    raise row.error
                row.emitted = row.take()
            yield rows
    finally:
        engine.remove(rows)
