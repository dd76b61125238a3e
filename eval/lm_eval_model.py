"""lm-evaluation-harness with mmspec as a model: ``python -m mmspec.eval lm_eval_model run --model mmspec ...``.

For harness releases up to 0.4.13, which do not load models from entry points; arguments are those of ``lm-eval``.
"""

if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model

    from mmspec.eval.adapters.lm_eval_model import MmspecLM

    register_model("mmspec")(MmspecLM)
    cli_evaluate()
