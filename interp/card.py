"""The model card that lies in every checkpoint folder, in the Hugging Face hub's form."""

from __future__ import annotations

import json
from typing import Any

import jinja2

from interp.evaluate import figure_lines

TEMPLATE = jinja2.Template(
    """\
---
license: mit
library_name: windtunnel
tags: [interpretability, bayesian-wind-tunnel, {{ task.name }}, {{ model.architecture }}]
---
# {{ name }}

A model (`{{ model.architecture }}`) trained on the Bayesian wind tunnel `{{ task.name }}`, whose \
exact posterior is known.

```python
from interp import load_checkpoint, diagnose

model, task = load_checkpoint("{{ name }}")
diagnose(model, task).to_html("report.html")
```

{% if lines -%}
{% if metrics.sequences -%}
Measured on {{ metrics.sequences }} held-out sequences (seed {{ metrics.seed }}), with 95 % bootstrap intervals over
sequences, beside predictors that know less; errors in bits.
{% endif %}
| {{ lines[0] | join(" | ") }} |
|{{ "---|" * lines[0] | length }}
{% for line in lines -%}
| {{ line.values() | join(" | ") }} |
{% endfor %}
{% endif -%}
How it was trained: `{{ training.command }}`{% if training.seconds %} \
({{ "%.0f" | format(training.seconds) }} s, status: {{ training.status }}){% endif %}.

| part | settings |
|---|---|
| task | `{{ task | tojson }}` |
| model | `{{ model | tojson }}` |
| training | `{{ training | tojson }}` |
| versions | `{{ versions | tojson }}` |
""",
    keep_trailing_newline=True,
)


def model_card(name: str, config: dict[str, Any]) -> str:
    """The card of a checkpoint from the content of its ``config.json``."""
    plain = json.loads(json.dumps(config))
    plain["training"].setdefault("command", "not recorded")
    lines = figure_lines(plain["metrics"], plain["task"]["name"]) if plain["metrics"] else []
    return TEMPLATE.render(name=name, lines=lines, **plain)
