"""A first text: one answer, a story in pieces, and a conversation that remembers.

python examples/first_text.py
python examples/first_text.py /ssd/a3b --memory 8GB
"""

from __future__ import annotations

import argparse

import moeflux


def main() -> None:
    parser = argparse.ArgumentParser(description="A first text.")
    parser.add_argument("model", nargs="?", help="a folder, a GGUF file or a repository; default: the built-in model")
    parser.add_argument("--memory", default="auto", help="the most that this process may take, as 8GB")
    arguments = parser.parse_args()

    with moeflux.load(arguments.model, memory=arguments.memory) as model:
        # All at once. The answer is a string that knows how it came about.
        with model.chat() as talk:
            answer = talk.ask("What is the capital of France?", temperature=0)
            print(answer.text)

        # Piece by piece, as it is made. The same seed gives the same text on every machine with this instruction set.
        session = model.session()
        for piece in session.generate("Once upon a time", max_tokens=40, temperature=0.8, seed=7):
            print(piece.text, end="", flush=True)
        print()

        # A conversation keeps what was said, and evaluates only what is new.
        with model.chat(system="Be kind.") as talk:
            for question in ("What is 3 plus 4?", "Name two colors."):
                print("you  :", question)
                print("model:", talk.ask(question, temperature=0, max_tokens=40).text)


if __name__ == "__main__":
    main()
