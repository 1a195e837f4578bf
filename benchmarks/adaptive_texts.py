"""Prompts of `adaptive.py`, written for it: eight whose answers repeat much of the prompt, and eight that are free.

Eight of a kind, since few texts have a favourite depth by chance that none of the others shares.
"""

from specplug.cli.demo_prompts import PROMPTS

_LETTER = (
    "Dear Mrs Halvorsen,\n"
    "thank you for you letter of the third of May. We have recieved the two boxes, but one of them was open and the "
    "blue lamp was broken. Please send us a new lamp, or give us the money back. The other box was in good order.\n"
    "Kind regards, Ibrahim Sesay"
)
_TABLE = """| city | river | bridges | oldest |
|---|---|---|---|
| Basel | Rhine | 6 | 1879 |
| Porto | Douro | 6 | 1886 |
| Budapest | Danube | 9 | 1849 |
| Newcastle | Tyne | 7 | 1876 |
| Lyon | Rhone | 13 | 1857 |"""
_FUNCTION = """function total(items, rate) {
  let sum = 0;
  for (const item of items) {
    if (item.price > 0) {
      sum += item.price * item.count;
    }
  }
  return sum * (1 + rate);
}"""
_MINUTES = (
    "Present were Ada Brandt, Luis Ortega and Mei Tanaka. Ada Brandt said that the roof of the library has to be "
    "repaired before the winter. Luis Ortega asked two firms for an offer, and the cheaper one wants 18,400 euros. "
    "Mei Tanaka will write to the town council. The next meeting is on the second Tuesday of October at seven."
)
_POEM = """The tide goes out, the tide comes in,
the boats lie down, the boats stand up,
the gulls walk where the crabs have been,
and rain fills every broken cup."""

COPYING = (
    *(prompt.text for prompt in PROMPTS if prompt.copies),
    f"Correct the spelling in this letter and write out the whole letter.\n\n{_LETTER}",
    f"Turn this table into CSV with the same columns.\n\n{_TABLE}",
    f"Add a comment above every line of this function and show it whole.\n\n```javascript\n{_FUNCTION}\n```",
    f"List who said or did what, one sentence for each person, in the words of these minutes.\n\n{_MINUTES}",
    f"Write this poem out again with a number before each line.\n\n{_POEM}",
)
FREE = (
    "Tell me about your favourite season and why people like it.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What should I cook for friends on a cold evening?",
    "Explain how rainbows form, to a child.",
    "Give me three ideas for a weekend without screens.",
    "Why do cats purr?",
    "Describe a market in a town by the sea.",
    "How does one learn to play the guitar?",
)
