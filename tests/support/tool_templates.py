"""Chat templates that know tools: short ones in the manner of families of models."""

from __future__ import annotations

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

OF = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}
