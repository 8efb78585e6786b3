"""GET /: one self-contained page that says what this is and how to call it."""

from __future__ import annotations

import html
from string import Template

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>headrace · $model</title>
<style>
:root { color-scheme: light dark; --ink: #16202a; --soft: #5b6875; --paper: #f6f8f9; --card: #fff; --line: #dde4e9;
  --water: #0b7285; --code: #0f1b24; --code-ink: #d9e6ee; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf2; --soft: #93a3b0; --paper: #0e151b; --card: #151f27;
  --line: #24313b; --water: #4dc4d8; --code: #0a1117; --code-ink: #cfe0ea; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 46rem; margin: 0 auto; padding: 4rem 1.25rem 3rem; }
h1 { margin: 0; font-size: 2.4rem; letter-spacing: -0.03em; }
h1 span { color: var(--water); }
h2 { margin: 2.2rem 0 .6rem; font-size: 1rem; }
p { margin: .6rem 0; color: var(--soft); }
strong { color: var(--ink); }
.state { display: inline-flex; gap: .5rem; align-items: center; margin-top: 1rem; padding: .3rem .8rem;
  border: 1px solid var(--line); border-radius: 99px; background: var(--card); font-size: .9rem; }
.state i { width: .55rem; height: .55rem; border-radius: 50%; background: #e8a33d; }
.state.ready i { background: #2f9e6e; }
pre { margin: 0; padding: 1rem 1.1rem; overflow-x: auto; border-radius: .6rem; background: var(--code);
  color: var(--code-ink); font: .84rem/1.55 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
table { width: 100%; border-collapse: collapse; font-size: .92rem; }
td { padding: .4rem .6rem .4rem 0; border-top: 1px solid var(--line); color: var(--soft); }
td:first-child { white-space: nowrap; }
code { font: .86em ui-monospace, "SF Mono", Menlo, Consolas, monospace; color: var(--ink); }
a { color: var(--water); }
</style>
</head>
<body>
<main>
<h1>head<span>race</span></h1>
<p>An LLM server that speaks the OpenAI API. Point any OpenAI client at it.</p>
<div class="state $status"><i></i><code>$model</code> $status</div>

<h2>From a terminal</h2>
<pre>curl $base/v1/chat/completions \\
  -H 'Content-Type: application/json' \\
  -d '{"model": $model_json,
       "messages": [{"role": "user", "content": "What is the capital of France?"}]}'</pre>

<h2>From Python</h2>
<pre>from openai import OpenAI

client = OpenAI(base_url="$base/v1", api_key="none")
stream = client.chat.completions.create(
    model=$model_json,
    messages=[{"role": "user", "content": "Tell me about rivers."}],
    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)</pre>

<h2>Routes</h2>
<table>
<tr><td><code>POST /v1/chat/completions</code></td><td>chat, streamed or whole</td></tr>
<tr><td><code>POST /v1/completions</code></td><td>plain text completion, streamed or whole</td></tr>
<tr><td><code>POST /v1/chat/completions/render</code></td><td>the prompt a chat becomes, token by token</td></tr>
<tr><td><code>POST /v1/tokenize</code></td><td>token ids of a prompt or a chat</td></tr>
<tr><td><a href="$root/v1/models"><code>GET /v1/models</code></a></td><td>what is served, and how it is</td></tr>
<tr><td><a href="$root/health"><code>GET /health</code></a></td><td>200 when requests are welcome</td></tr>
<tr><td><a href="$root/docs"><code>GET /docs</code></a></td><td>every route and field</td></tr>
<tr><td><a href="$root/metrics"><code>GET /metrics</code></a></td><td>Prometheus</td></tr>
</table>
</main>
</body>
</html>
""")


def render(model: str, base: str, root_path: str, status: str) -> str:
    """The page for a served model; ``base`` is this server's address as the visitor sees it."""
    return _PAGE.substitute(
        model=html.escape(model),
        model_json=html.escape(f'"{model}"', quote=False),
        base=html.escape(base),
        root=html.escape(root_path),
        status=html.escape(status),
    )
