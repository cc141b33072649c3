"""What changes in the course of a training, as functions of the step alone: so a resumed run cannot differ."""

from __future__ import annotations

from tools.train.config import Course

LAST_RATE = 0.02  # of the full learning rate, where the decay ends


def rate(course: Course, step: int) -> float:
    """The learning rate of step 0, 1, ...: a rise, a plateau, a straight fall."""
    rising = min(1.0, (step + 1) / course.warmup) if course.warmup else 1.0
    return course.learning_rate * rising * (1 - (1 - LAST_RATE) * falling(course, step))


def falling(course: Course, step: int) -> float:
    """How far the decay has come, 0 to 1."""
    length = course.decay * course.steps
    return min(1.0, max(0.0, step + 1 - (course.steps - length)) / length) if length else 0.0


def is_quantised(course: Course, step: int) -> bool:
    return step >= round(course.steps * (1 - course.quantised))


def chat_share(course: Course, step: int, natural: float) -> float:
    """The share of windows that are chats; `natural` is theirs in the corpus. All or nothing stays so."""
    if natural in (0.0, 1.0):
        return natural
    start = course.chat or natural
    return start + (course.chat_end - start) * falling(course, step)
