"""A production loop: requests of several users come in, are evaluated together, and are streamed as they come about.

    python examples/many_users.py
    python examples/many_users.py /ssd/a3b --memory 12GB --sessions 8

What a service has to think of is here: a line that may be full, deadlines, users who go away, a stop that lets answers
end. No answer depends on who else asks.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal

import moeflux
from moeflux.serving import Request, Scheduler

LOG = logging.getLogger("service")
QUESTIONS = {
    "ann": ["What is 3 plus 4?", "What is the capital of France?"],
    "ben": ["Name two colors.", "Tell me a story about a fox."],
    "eve": ["What is the capital of Spain?"],
}


class Service:
    def __init__(self, model: moeflux.Model, scheduler: Scheduler) -> None:
        self.model = model
        self.scheduler = scheduler

    async def answer(self, user: str, question: str) -> str:
        """What the model says. The task may be cancelled, as when the user closes the window: so is the answer."""
        chat_format = self.model.chat_format
        if chat_format is None:
            raise SystemExit("this model has no chat template: give it tokens, or text by model.tokenizer")
        messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": question}]
        request = Request(
            chat_format.encode(messages),
            continues=False,  # a text of its own, not the next words of the prompt
            max_tokens=60,
            tenant=user,  # users take turns, however much one of them asks
            deadline=60,  # seconds; then it ends with what there is
        )
        while True:
            try:
                handle = self.scheduler.submit(request)
                break
            except moeflux.Refused as refused:  # too many wait
                LOG.warning("%s waits: %s", user, refused)
                await asyncio.sleep(1)
        text = ""
        async for piece in handle:
            text += piece.text  # a web service would send it here
        LOG.info("%s: %s, %d tokens of the prompt were known", user, handle.finish, handle.stats.reused_tokens)
        return text


async def user(service: Service, name: str) -> None:
    for question in QUESTIONS[name]:
        try:
            print(f"{name}: {question}\n  -> {await service.answer(name, question)}")
        except moeflux.Error as error:  # this answer failed, and the others go on
            LOG.error("%s: %s", name, error)


async def serve(service: Service) -> None:
    users = [asyncio.create_task(user(service, name)) for name in QUESTIONS]

    def stop() -> None:
        for each in users:
            each.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    await asyncio.gather(*users, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="A production loop.")
    parser.add_argument("model", nargs="?", help="a folder, a GGUF file or a repository; default: the built-in model")
    parser.add_argument("--memory", default="auto", help="the most that this process may take, as 12GB")
    parser.add_argument("--sessions", type=int, default=4, help="answers that are made at a time")
    parser.add_argument("--disk", help="a folder where conversations lie that nobody has used for a while")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    with (
        moeflux.load(arguments.model, memory=arguments.memory, sessions=arguments.sessions) as model,
        Scheduler(model, disk=arguments.disk) as scheduler,
    ):
        asyncio.run(serve(Service(model, scheduler)))
        print(scheduler.stats)


if __name__ == "__main__":
    main()
