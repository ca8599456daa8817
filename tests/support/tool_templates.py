"""Chat templates that know tools: short ones in the manner of families of models."""

from __future__ import annotations

import re


def marked(text: str) -> str:
    """With DeepSeek's own characters in its marks, which are written <|tool_sep|> here."""
    return re.sub(r"<\|(\w+)\|>", _as_there, text)


def _as_there(found: re.Match[str]) -> str:
    return "<\uff5c" + found[1].replace("_", "\u2581") + "\uff5c>"


HERMES = """\
{%- if tools %}<|im_start|>system
Tools: {% for t in tools %}{{ t | tojson }}{% endfor %}
Call within <tool_call></tool_call>.<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}
{%- for c in m.tool_calls or [] %}
<tool_call>
{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""

LLAMA = """\
{%- for m in messages %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception("one call at once") }}{% endif %}
{%- set c = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>

{"name": {{ c.name | tojson }}, "parameters": {{ c.arguments | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>{{ "ipython" if m.role == "tool" else m.role }}<|end_header_id|>

{% if tools and loop.first %}Answer with a call as {"name": its name, "parameters": its values}.
{% for t in tools %}{{ t | tojson }}
{% endfor %}{% endif %}{{ m.content }}<|eot_id|>
{%- endif %}
{%- endfor %}<|start_header_id|>assistant<|end_header_id|>

"""

MISTRAL = """\
{%- set asked = messages | selectattr("role", "eq", "user") | list %}
{%- for m in messages %}
{%- if m.role == "user" %}
{%- if tools and m == asked[-1] %}
{{- "[AVAILABLE_TOOLS]" }}{{ tools | tojson }}[/AVAILABLE_TOOLS]
{%- endif %}
{{- "[INST]" + m.content + "[/INST]" }}
{%- elif m.tool_calls %}[TOOL_CALLS][
{%- for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception("an id has nine letters") }}{% endif %}
{{- {"name": c.function.name, "arguments": c.function.arguments, "id": c.id} | tojson }}
{%- if not loop.last %}, {% endif %}
{%- endfor %}]</s>
{%- elif m.role == "tool" %}[TOOL_RESULTS]
{{- {"content": m.content, "id": m.tool_call_id} | tojson }}[/TOOL_RESULTS]
{%- else %}{{ m.content }}</s>
{%- endif %}
{%- endfor %}"""

MISTRAL_ARGS = """\
{%- for m in messages %}
{%- if m.role == "user" %}
{%- if tools and loop.first %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- "[INST]" + m.content + "[/INST]" }}
{%- elif m.tool_calls %}
{%- for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception("an id has nine letters") }}{% endif %}
{{- "[TOOL_CALLS]" + c.function.name + "[CALL_ID]" + c.id + "[ARGS]" }}
{{- c.function.arguments | tojson }}
{%- endfor %}</s>
{%- elif m.role == "tool" %}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}
{{- "[/TOOL_RESULTS]" }}
{%- else %}{{ m.content }}</s>
{%- endif %}
{%- endfor %}"""

XML = """\
{%- if tools %}<|im_start|>system
<tools>{% for t in tools %}<function><name>{{ t.function.name }}</name>
{%- for name, one in t.function.parameters.properties | items %}
<parameter><name>{{ name }}</name>{{ one | tojson }}</parameter>{% endfor %}</function>
{%- endfor %}</tools><|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ "user" if m.role == "tool" else m.role }}
{{ m.content }}
{%- for c in m.tool_calls or [] %}
<tool_call>
<function={{ c.function.name }}>
{%- for name, value in c.function.arguments | items %}
<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
{%- endfor %}
</function>
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""

DEEPSEEK = marked("""\
{%- for m in messages if m.role == "system" %}{{ m.content }}{% endfor %}
{%- for m in messages if m.role != "system" %}
{%- if m.role == "user" %}{{ "<|User|>" + m.content + "<|Assistant|>" }}
{%- elif m.role == "tool" %}
{{- "<|tool_output_begin|>" + m.content + "<|tool_output_end|>" }}
{%- elif m.tool_calls %}{{ "" if m.content is none else m.content + " " }}<|tool_calls_begin|>
{%- for c in m.tool_calls %}
{{- "<|tool_call_begin|>" + c.function.name + "<|tool_sep|>" + c.function.arguments }}
{{- "<|tool_call_end|>" }}
{%- endfor %}<|tool_calls_end|>
{%- else %}{{ m.content }}
{%- endif %}
{%- endfor %}""")

DEEPSEEK_FENCED = DEEPSEEK.replace(
    marked('c.function.name + "<|tool_sep|>" + c.function.arguments'),
    marked(
        '"function<|tool_sep|>" + c.function.name + "\\n```json\\n" '
        '+ c.function.arguments + "\\n```"'
    ),
)

OF = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}
"""Those that write tools, and calls with their names in JSON."""

THINKING = (
    "{% for m in messages %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}\n{% endfor %}{{ effort | default('') }}"
    "{% if thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)
"""As those of Qwen 3 and DeepSeek, in short."""
