"""Names as a hostile run could have them: each tries to become markup, code, or another text."""

from __future__ import annotations

HOSTILE = (
    "</script><script>window.hacked=1</script>",
    "<img src=x onerror=alert(1)>",
    "\"><svg onload=alert(1)>'",
    "' onmouseover='alert(1)' x='",
    "javascript:alert(document.domain)",
    "[click](javascript:alert(1)) ![x](https://evil.example/x.png) <https://evil.example>",
    "@everyone #1 GH-2 https://evil.example www.evil.example a@evil.example :tada:",
    "| a | b |\n| --- | --- |\n```\n</details><h1>out</h1>",
    "\x1b[31mred\x1b[0m\x1b]8;;https://evil.example\x07link\x1b]8;;\x07",
    "\u202egpj.exe\u202c \u2066hidden\u2069 \u200b\u200d\ufeff\u2028\u2029",
    "<!-- --!> --> <![CDATA[ ]]> &lt;b&gt; &#60;script&#62;",
    "{{constructor.constructor('alert(1)')()}} ${alert(1)} %s %n \\u003cscript\\u003e",
    "</title></style></textarea><base href=https://evil.example/>",
    "n" * 10_000,
    "<b>" * 3_000,
    "\x00\x01\x7f\x80\x9f",
    "__proto__",
)
