"""Write prompts about code, chat and prose to train a drafter of a chat model on: `python tools/training_prompts.py OUT.jsonl`.

They are made of templates and of Python's standard library, so that none is taken from the data of a benchmark. The same
interpreter writes the same prompts, about 6,700.
"""

# ruff: noqa: SIM905 (words in a text are easier to read than a list)

from __future__ import annotations

import ast
import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from secondguess.train.stdlib_prompts import standard_library_prompts

NUM_COMPLETIONS, NUM_FUNCTIONS, NUM_TASKS, NUM_QUESTIONS, NUM_SUMS, NUM_PASSAGES = (
    1500,
    2200,
    400,
    2300,
    400,
    500,
)
LONGEST = 1400  # characters of a prompt
ABOUT_FUNCTIONS = (
    "Complete this Python function:\n\n```python\n{head}\n```", "Write a Python function `{name}`. {summary}",
    "Explain what this function does:\n\n```python\n{whole}\n```", "Write unit tests for it:\n\n```python\n{whole}\n```",
    "Add type hints and comments to this code:\n\n{whole}", "Make this function shorter:\n\n```python\n{whole}\n```",
    "Translate this Python function into JavaScript:\n\n```python\n{whole}\n```",
)  # fmt: skip
TASKS = (
    "Write a {language} function that {verb} {thing}.", "How do I write {language} code that {verb} {thing}?",
    "Write a {language} program that {verb} {thing}, and show how it is used.",
    "I need a {language} class with a method that {verb} {thing}. Handle errors.",
)  # fmt: skip
LANGUAGES = "Python,Python,Python,Python,JavaScript,Java,C++,SQL,Bash,Go,Rust".split(",")
VERBS = (
    "reverses,sorts,filters,counts,validates,parses,merges,splits,compresses,prints,searches,rotates,flattens,formats,groups,"
    "removes duplicates from,finds the largest element of,computes the average of,converts to JSON,writes to a file"
).split(",")
THINGS = (
    "a list of integers,a string,a dictionary,a linked list,a matrix,a CSV file,a list of dates,a binary tree,a queue of tasks,"
    "a list of email addresses,a set of points,a log file,a nested list,a text with several lines,a list of prices,a graph,"
    "a deck of cards,a shopping cart,a table of students and grades,a list of words"
).split(",")
QUESTIONS = (
    "Explain {topic} in simple terms.", "Write a short story about {topic}.", "Write a poem about {topic}.",
    "What are the main facts about {topic}?", "List ten tips about {topic}.", "Write an essay of four paragraphs about {topic}.",
    "Describe {topic} to a child.", "What are the advantages and disadvantages of {topic}?", "Write a blog post about {topic}.",
    "Write an email to a colleague about {topic}.", "Make a plan of five steps for {topic}.", "Who should learn about {topic}?",
    "Write a dialogue between two people about {topic}.", "Summarize in one paragraph what is known about {topic}.",
    "How has {topic} changed over the last hundred years?", "Answer briefly: why does {topic} matter?",
    "Create a quiz of five questions about {topic}, with answers.", "Give arguments for and against {topic}.",
    "You are a teacher. Introduce {topic} to your class.", "What is the most common mistake about {topic}?",
    "What is {topic}?", "Compare {topic} with something similar.", "Write a letter to a friend about {topic}.",
    "Write a JSON object that describes {topic} with five fields.", "Make a table in Markdown about {topic}.",
    "Write a news report about {topic}.", "Tell me a joke about {topic}.",
)  # fmt: skip
TOPICS = (
    "the water cycle,black holes,photosynthesis,the French Revolution,the Roman Empire,the history of Japan,jazz music,"
    "a trip to Norway,a weekend in Rome,growing tomatoes,baking sourdough bread,a vegetarian lasagne,learning to swim,"
    "running a marathon,yoga,playing chess,the rules of football,climate change,solar power,electric cars,the stock market,"
    "inflation,saving money,a small business,writing a CV,a job interview,time management,working from home,leading a team,"
    "public speaking,Spanish grammar,Shakespeare,fairy tales,Greek mythology,the Olympic Games,the moon landing,gravity,"
    "quantum mechanics,the periodic table,DNA,vaccines,the human heart,sleep,a healthy diet,stress,raising a puppy,bees,whales,"
    "dinosaurs,volcanoes,earthquakes,the Amazon rainforest,the Arctic,the Great Wall of China,the pyramids,the printing press,"
    "the steam engine,the internet,artificial intelligence,neural networks,databases,operating systems,passwords,"
    "open source software,video games,photography,painting,architecture,cinema,fashion,gardening,recycling,bicycles,trains,"
    "lighthouses,a letter in a bottle,a lost key,an old clock,a robot that learns to cook,a dragon who is afraid of fire,"
    "two friends who meet again,a detective in a small town,a storm at sea,a journey to Mars,the last library,"
    "a child's first day at school,winter in the mountains,the city at night,democracy,human rights,taxes,insurance,marketing,"
    "customer service,project management,statistics,probability,prime numbers,fractions,geometry,calculus,coffee,tea,cheese,"
    "spices,sushi,breakfast,birthdays,weddings,camping,hiking,sailing,astronomy,weather forecasts,maps,museums,a mobile app,"
    "a bakery,a bookshop,a hotel review"
).split(",")
SUMS = (
    "{name} has {many} {things}, gets {some} more and gives away {few}. How many {things} does {name} have now?",
    "A box holds {some} {things}. {name} buys {few} boxes and has {many} {things} already. How many are there in total?",
    "{name} earns ${many} per hour and works {some} hours a day for {few} days. How much does {name} earn?",
    "What is {many} * {some} + {few}? Explain each step.", "Solve for x: {some}x + {few} = {many}.",
)  # fmt: skip
NAMES, COUNTED = (
    "Anna,Ben,Clara,David,Emma,Felix".split(","),
    "apples,books,pencils,tickets,stamps".split(","),
)
ABOUT_TEXTS = (
    "Summarize the following text:\n\n{text}", "Summarize this in one sentence.\n\n{text}",
    "Rewrite the following text in simple words:\n\n{text}", "List the key points of this text:\n\n{text}",
    "Text: {text}\n\nQuestion: What is the main point?", "Translate the following text into German:\n\n{text}",
)  # fmt: skip


def functions() -> Iterator[dict[str, str]]:
    """Yield name, head, summary and source of the documented functions of the standard library."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                head = "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno])
                whole = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                summary = " ".join(text.split("\n\n")[0].split())
                yield {"name": node.name, "head": head, "whole": whole, "summary": summary}


def passages() -> Iterator[str]:
    """Yield paragraphs of the language reference."""
    for topic in topics.values():
        for paragraph in re.split(r"\n\s*\n", topic):
            text = " ".join(paragraph.split())
            if 250 < len(text) < 1100:
                yield text


def questions(rng: random.Random) -> Iterator[str]:
    """Yield the messages of chats."""
    for found in rng.sample(list(functions()), NUM_FUNCTIONS):
        yield rng.choice(ABOUT_FUNCTIONS).format(**found)
    for verb, thing in rng.sample([(verb, thing) for verb in VERBS for thing in THINGS], NUM_TASKS):
        yield rng.choice(TASKS).format(language=rng.choice(LANGUAGES), verb=verb, thing=thing)
    asked = [(question, topic) for question in QUESTIONS for topic in TOPICS]
    for question, topic in rng.sample(asked, NUM_QUESTIONS):
        yield question.format(topic=topic)
    for _ in range(NUM_SUMS):
        numbers = {"many": rng.randint(20, 90), "some": rng.randint(5, 19), "few": rng.randint(2, 4)}
        yield rng.choice(SUMS).format(name=rng.choice(NAMES), things=rng.choice(COUNTED), **numbers)
    for text in rng.sample(list(passages()), NUM_PASSAGES):
        yield rng.choice(ABOUT_TEXTS).format(text=text)


def records(seed: int = 0) -> list[dict[str, Any]]:
    """Return prompts to continue and messages to answer, mixed."""
    rng = random.Random(seed)
    found: list[dict[str, Any]] = [{"prompt": text} for text in standard_library_prompts(NUM_COMPLETIONS)]
    found += [
        {"messages": [{"role": "user", "content": text}]} for text in questions(rng) if len(text) <= LONGEST
    ]
    rng.shuffle(found)
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(json.dumps(record) + "\n" for record in records()))
