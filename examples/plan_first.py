"""Plans: which models run in a given amount of memory, and what more memory would bring. Nothing is downloaded.

python examples/plan_first.py
python examples/plan_first.py --memory 16GB --context 32768
"""

from __future__ import annotations

import argparse

import moeflux

MODELS = ("builtin", "Qwen3.6-35B-A3B", "gpt-oss-120b", "GLM-4.5-Air", "Kimi-K2")


def main() -> None:
    parser = argparse.ArgumentParser(description="Which models run in a given amount of memory.")
    parser.add_argument("models", nargs="*", default=MODELS, help="presets, config.json files, folders, repositories")
    parser.add_argument("--memory", default="8GB")
    parser.add_argument("--context", type=int, default=8192)
    arguments = parser.parse_args()

    print(f"in {arguments.memory}, with room for {arguments.context} tokens:\n")
    for name in arguments.models:
        print(f"{name:<20}{line_of(name, arguments.memory, arguments.context)}")


def line_of(name: str, memory: str, context: int) -> str:
    folder = None if name == "builtin" else name
    try:
        context = min(context, moeflux.plan(folder, memory=None).context)
        plan = moeflux.plan(folder, memory=memory, context=context)
    except moeflux.BudgetError as error:  # it says what the least would be
        assert error.needed is not None
        return f"needs {error.needed / 1e9:.1f} GB"
    share = plan.slots / plan.experts
    read = plan.bytes_read_per_token / 1e6
    speed = f", {plan.tokens_per_second:.1f} tokens a second" if plan.tokens_per_second else ""
    return f"runs with {share:.0%} of its experts in memory; reads {read:.0f} MB a token{speed}"


if __name__ == "__main__":
    main()
