"""The demo's prompts, written for it: three whose answers repeat much of the prompt, and one that does not."""

from collections.abc import Mapping
from dataclasses import dataclass

_CODE = """def load_config(path):
    settings = {}
    with open(path) as handle:
        for line in handle:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            key, value = line.split("=", 1)
            settings[key.strip()] = value.strip()
    return settings


def save_config(path, settings):
    with open(path, "w") as handle:
        for key, value in settings.items():
            handle.write(f"{key} = {value}\\n")
"""

_ORDERS = """Text: Marta Lindqvist from Uppsala ordered 3 items for 74.50 euros.
JSON: {"customer": "Marta Lindqvist", "city": "Uppsala", "items": 3, "total": 74.50}

Text: Jon Arregui from Bilbao ordered 1 item for 12.00 euros.
JSON: {"customer": "Jon Arregui", "city": "Bilbao", "items": 1, "total": 12.00}

Text: Priya Raman from Chennai ordered 7 items for 210.25 euros.

Text: Tom Okafor from Lagos ordered 2 items for 33.80 euros."""

_REPORT = (
    "The harbour ferry was out of service for six days after its steering pump failed on Monday morning. "
    "Engineers from the yard replaced the pump and tested it twice before the port authority let the boat sail again. "
    "During the repair a smaller boat carried passengers, but it could not take cars. "
    "The operator says that a second pump has been ordered and will be kept on the island."
)


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A chat of one user message."""

    name: str
    text: str
    copies: bool
    """The answer repeats much of the prompt."""

    @property
    def messages(self) -> list[Mapping[str, str]]:
        """The prompt as chat messages."""
        return [{"role": "user", "content": self.text}]


PROMPTS = (
    DemoPrompt(
        "code edit",
        f"Rename the variable `settings` to `options` in this code and show the whole code.\n\n```python\n{_CODE}```",
        copies=True,
    ),
    DemoPrompt(
        "JSON extraction",
        f"Extract the orders from these texts as JSON, all four in one list.\n\n{_ORDERS}",
        copies=True,
    ),
    DemoPrompt(
        "summary, quotes",
        f"{_REPORT}\n\nQuote the two most important sentences of the text above, then say in one line what they mean.",
        copies=True,
    ),
    DemoPrompt("free chat", "Tell me a short story about a lighthouse keeper who finds a letter.", copies=False),
)
