"""The topics by name. A topic is a function that draws a scene."""

from collections.abc import Callable

from redline.datasets.conversations.draw import Draw
from redline.datasets.conversations.scene import Scene
from redline.datasets.conversations.topics import (
    arithmetic,
    comparing,
    facts,
    form,
    lists,
    memory,
    reasoning,
    small_talk,
    spelling,
    stories,
    system_prompts,
    unknown,
    words_and_forms,
)

Topic = Callable[[Draw], Scene]
TOPICS: dict[str, Topic] = {
    "arithmetic": arithmetic.scene,
    "comparing": comparing.scene,
    "spelling": spelling.scene,
    "facts": facts.scene,
    "words": words_and_forms.scene,
    "reasoning": reasoning.scene,
    "stories": stories.scene,
    "memory": memory.scene,
    "lists": lists.scene,
    "itself": small_talk.about_itself,
    "unknown": unknown.scene,
    "form": form.scene,
    "system": system_prompts.scene,
    "small talk": small_talk.scene,
    "untold": memory.nothing_told,
}
# How often each topic is drawn, relative to the others. "system" is missing because a system prompt can only open a
# conversation, so `conversation` draws it separately.
WEIGHTS = {
    "arithmetic": 14,
    "comparing": 8,
    "spelling": 14,
    "facts": 16,
    "words": 8,
    "reasoning": 10,
    "stories": 9,
    "memory": 10,
    "lists": 6,
    "itself": 6,
    "unknown": 8,
    "form": 10,
    "small talk": 6,
    "untold": 2,
}
