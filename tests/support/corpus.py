"""A varied text of over 500 lines for tokenizers: code, scripts, emoji, accents, digits, odd white space."""

# ruff: noqa: E501 - templates and texts stay on the lines that their makers give them

from __future__ import annotations

import random
from functools import cache

_PROSE = """\
The quick brown fox jumps over the lazy dog, doesn't it? It'll be 3:45 p.m. soon; we've got 12,345 reasons.
I'LL say what THEY'VE said: DON'T, can't, Won'T, she'd, 'tis, rock'n'roll, O'Neill's dogs' bones.
Mr. Smith paid $1,234.56 (about 1.100,50 €) on 2024-02-29 at 09:08:07 -- or was it £999?
Hello world! Café déjà vu — 123 😊
“Curly quotes” and ‘single ones’ … an ellipsis, a dash – another — and a hyphen-minus.
Voilà l'été où naïve garçon señor Größe Straße ÆØÅ æøå þórr Œuvre œuvre ſtraße İstanbul ıŞığ
Příliš žluťoučký kůň úpěl ďábelské ódy. Zażółć gęślą jaźń. Árvíztűrő tükörfúrógép.
Съешь же ещё этих мягких французских булок, да выпей чаю. Ἐν ἀρχῇ ἦν ὁ λόγος. Γειά σου Κόσμε!
שלום עולם, מה שלומך? مرحبا بالعالم، كيف حالك؟ १२३ नमस्ते दुनिया, क्षत्रिय ज्ञान
สวัสดีชาวโลก ๑๒๓ ជំរាបសួរ မင်္ဂလာပါ გამარჯობა Բարեւ አማርኛ ሰላም ᠮᠣᠩᠭᠣᠯ ཞབས་
中文分詞測試：今天天氣很好，我們去公園吧！「引號」、《書名》（括號）１２３ＡＢＣ　全角空格。
日本語のテキスト：カタカナ、ひらがな、漢字を混ぜて、ﾊﾝｶｸも。東京都は２０２４年に…
한국어 문장입니다. 띄어쓰기와 조사, ㅋㅋㅋ 그리고 ᄒᆞᆫ글 옛말.
𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝒎𝒂𝒕𝒉 𝟙𝟚𝟛 ∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, ∑ᵢ₌₁ⁿ i² ≤ ½·n³ ± √2 ≈ 1.41421356 ⅷ Ⅷ ① ㊿ ௧ 〇
e\u0301 vs \u00e9; A\u030a vs \u00c5 vs \u212b; \u1e9b\u0323; q\u0307\u0323; \u0061\u0308\u0323; ﬁ ligature ﬀ ǆ
"""

_EMOJI = "😀 🫠 👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇯🇵 ❤️ ☺ ✈️ 1️⃣ #️⃣ 🧑🏿‍🚀 ©️ 🀄 🃏 ⌚ ♾️ 🫡🫠🥹"

_CODE = """\
def add(a: int, b: int) -> int:
    \"\"\"Return a+b.\"\"\"
    return a + b  # 1+1==2

for (int i = 0; i < n; ++i) { a[i] += b[i] * 0x1F; }
\tif (x != NULL && *p++ == '\\n') goto end;
const f = async (x) => { await g(`${x}\\t`); };
SELECT * FROM "users" WHERE id IN (1, 22, 333, 4444) AND name LIKE '%O''Brien%';
<div class="a-b_c" id='x'>&nbsp;&amp;</div><!-- comment --><br/>
#include <stdio.h>
\\begin{equation} e^{i\\pi} + 1 = 0 \\end{equation}
curl -sSL 'https://example.org/a?b=c&d=%20#frag' | sh -c "$(cat)" > /dev/null 2>&1
fn main() -> Result<(), Box<dyn Error>> { println!("{:?}", vec![1u8, 2, 3]); Ok(()) }
{"key": [1.5e-10, null, true, "\\u00e9"], "nested": {"a": {}}}
x <- c(1L, NA, 3.14); y %>% filter(z == "a") |> print()
@@ -1,3 +1,4 @@ !important ::before $HOME ~/path/*.tar.gz C:\\Users\\me ^\\d+(?:\\.\\d+)?$
snake_case camelCase PascalCase SCREAMING_CASE kebab-case HTTPServer2XMLParser v1.2.3-rc.4 iPhone15Pro
"""

_SPACES = [
    " leading",
    "trailing ",
    "  two",
    "   three   ",
    "\tone tab",
    "\t\ttwo tabs\t",
    "a  b   c    d     e",
    "a\tb\t\tc",
    " \t mixed \t ",
    "no\u00a0break\u202fnarrow\u2009thin\u3000wide\u2003em",
    "zero\u200bwidth\u200djoin\ufeffbom",
    "vertical\x0bform\x0cfeed\x1cfs\x85nel\u2028ls\u2029ps",
    "carriage\rreturn",
    "bell\x07 null-ish\x01\x02 escape\x1b[31mred\x1b[0m del\x7f",
    "                                                    fifty",
    "▁lower one eighth▁block ▁",
    "Ġ Ċ ĉ are letters of the byte alphabet",
    "word " * 12,
    "!!!???...,,,;;;:::---___===+++***///\\\\\\|||&&&%%%$$$###@@@",
    "((((([[[[[{{{{{<<<<<>>>>>}}}}}]]]]])))))",
    "\u0301combining first \u0903 \u20dd",
]


def _digits(rng: random.Random) -> str:
    number = str(rng.randrange(10 ** rng.randrange(1, 20)))
    return rng.choice(
        [number, f"{int(number):,}", f"-{number}.{number[::-1]}", f"{number}th x{number}y", f"№{number}"]
    )


def _random_line(rng: random.Random) -> str:
    blocks = [
        (0x20, 0x7E), (0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7F),
        (0x1100, 0x11FF), (0x2000, 0x206F), (0x2070, 0x218F), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3),
        (0xFF00, 0xFFEF), (0x1F300, 0x1F6FF), (0x1F900, 0x1F9FF),
    ]  # fmt: skip
    low, high = rng.choice(blocks)
    words = (
        "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 8)))
        for _ in range(rng.randint(1, 9))
    )
    return rng.choice([" ", "  ", "", ", ", "\t"]).join(words)


@cache
def corpus_lines() -> tuple[str, ...]:
    """The same lines on every machine; none holds a line feed."""
    rng = random.Random(20240229)
    lines = [
        *_PROSE.splitlines(),
        *_CODE.splitlines(),
        _EMOJI,
        *_EMOJI.split(" "),
        *_SPACES,
        "",
        " ",
        "\t",
        "  ",
    ]
    prose = [line for line in _PROSE.splitlines() if line]
    for _ in range(90):
        words = " ".join(rng.sample(prose, 2)).split(" ")
        rng.shuffle(words)
        lines.append(rng.choice([" ", " ", "  "]).join(words[: rng.randint(3, 16)]))
    code = [line for line in _CODE.splitlines() if line]
    for _ in range(90):
        line = rng.choice(code)
        lines.append(
            " " * rng.randrange(0, 17) + "\t" * rng.randrange(0, 3) + line[rng.randrange(len(line)) :]
        )
    lines += [_digits(rng) for _ in range(90)]
    lines += [_random_line(rng) for _ in range(240)]
    return tuple(line.replace("\n", " ") for line in lines)


@cache
def corpus_blocks() -> tuple[str, ...]:
    """Stretches of several lines with empty ones and both line ends, since words may span line ends."""
    rng = random.Random(7)
    lines = corpus_lines()
    blocks = []
    for start in range(0, len(lines), 8):
        block = ""
        for line in lines[start : start + 8]:
            block += line + rng.choice(["\n", "\n", "\n\n", "\r\n", "\n\n\n", " \n", "\r\n\r\n", "\n \n"])
        blocks.append(block)
    return tuple(blocks)
