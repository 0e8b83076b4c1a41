"""The bundled demo model's tokenizer and chat template."""

from __future__ import annotations

import json
import re
from collections import Counter

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from harness.tool_dialogues import CALL, CALL_END, END, START, TOOLS, TOOLS_END, Writer

PAD = "<|pad|>"
MARKS = (END, PAD, START, TOOLS, TOOLS_END, CALL, CALL_END)  # in the order of their numbers
FREQUENT = 100  # words that have a token together with the space before them
DIALOGUES = 700

# Without tools, a user's line opens a scene, like every scene of the plays; the answer is the speech of Second Citizen and what follows up
# to the next END. A message that starts with a heading of its own ("JULIET:" on a line) keeps it. With tools it is a dialogue of the form
# that Qwen's models have. Of a tool it shows what a small model can use: its description first, by which it is chosen, its name, and its
# parameters with their types or the lists of their values.
CHAT_TEMPLATE = """\
{%- set with_tools = namespace(found=tools | default(none) is not none and tools | length > 0) -%}
{%- for message in messages if message['role'] == 'tool' or message['tool_calls'] -%}
{%- set with_tools.found = true -%}
{%- endfor -%}
{%- if with_tools.found -%}
{%- set begins = messages[0]['role'] == 'system' -%}
{%- if tools or begins -%}
{{- '<|im_start|>system\\n' ~ (messages[0]['content'] | trim if begins else '') -}}
{%- if tools -%}
{{- ('\\n\\n' if begins else '') ~ '<tools>' -}}
{%- for tool in tools -%}
{%- set function = tool['function'] if 'function' in tool else tool -%}
{{- '\\n{"description": ' ~ ((function['description'] or function['name'] | replace('_', ' ')) | tojson) -}}
{{- ', "name": ' ~ (function['name'] | tojson) ~ ', "arguments": {' -}}
{%- for name, given in ((function['parameters'] | default({}, true))['properties'] | default({}, true)).items() -%}
{{- (name | tojson) ~ ': ' ~ ((given['enum'] or given['type'] or 'string') | tojson) ~ ('' if loop.last else ', ') -}}
{%- endfor -%}
{{- '}}' -}}
{%- endfor -%}
{{- '\\n</tools>' -}}
{%- endif -%}
{{- '<|endoftext|>' -}}
{%- endif -%}
{%- for message in (messages[1:] if begins else messages) -%}
{{- '<|im_start|>' ~ message['role'] ~ '\\n' ~ (message['content'] | default('', true) | trim) -}}
{%- for call in message['tool_calls'] | default([], true) -%}
{%- set function = call['function'] if 'function' in call else call -%}
{%- set given = function['arguments'] -%}
{{- '\\n' if message['content'] or not loop.first -}}
{{- '<tool_call>\\n{"name": ' ~ (function['name'] | tojson) ~ ', "arguments": ' -}}
{{- (given if given is string else given | tojson) ~ '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|endoftext|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
{%- else -%}
{%- for message in messages -%}
{%- set content = message['content'] | trim -%}
{%- if message['role'] == 'assistant' -%}
{{- ('' if content.split('\\n')[0].endswith(':') else 'Second Citizen:\\n') ~ content ~ '\\n\\n' -}}
{%- else -%}
{{- '<|endoftext|>' -}}
{%- if ':\\n' not in content -%}
{{- 'Chorus:\\n' if message['role'] == 'system' else 'First Citizen:\\n' -}}
{%- endif -%}
{{- content + '\\n\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- 'Second Citizen:\\n' -}}
{%- endif -%}
{%- endif -%}
"""


def train_tokenizer(text: str, seed: int, context: int, vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on plays and on dialogues with tools.

    A run of line breaks is a separate word: text may be cut after one without changing its tokens. So is the space before a word, unless
    the word is one of the most frequent: a value has the same tokens in a sentence and in the JSON of a call, which can then be copied.
    Digits and the marks of dialogues are one token each.
    """
    frequent = Counter(re.findall(r"(?<= )[a-z]+\b", text)).most_common(FREQUENT)
    spaced = "|".join(sorted(["I", *(word for word, _ in frequent)], key=lambda word: (-len(word), word)))
    parts = (
        r"\n+",
        r"'(?:s|t|re|ve|m|ll|d)\b",
        rf" (?:{spaced})\b",
        r"\p{L}+",
        r"\p{N}",
        r'["}\]]*[:,] ["{\[]+',
        r'["{}\[\]]+[:,]?',
        r'[^\s\p{L}\p{N}"{}\[\]]+',
        r"[^\S\n]+",
    )
    trained = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex("|".join(parts)), behavior="isolated")
    trained.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    trained.decoder = decoders.ByteLevel()
    writer = Writer(seed)
    dialogues = [writer.dialogue(3) for _ in range(DIALOGUES)]
    unmarked = [re.sub("|".join(map(re.escape, MARKS)), "\n", dialogue) for dialogue in dialogues]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(MARKS), initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([text, *unmarked], trainer)
    content = json.loads(trained.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["content"] in (END, PAD, START)  # the marks of calls are text, which a decoder must keep
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)),
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        model_max_length=context,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
