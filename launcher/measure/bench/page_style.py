"""Colours and style sheet of the report's page; light, dark, narrow and printed. Pure.

Contrast after WCAG 2.2: text at least 4.5 to 1 (section 1.4.3), lines and marks at least 3 to 1 (1.4.11)."""

from __future__ import annotations

from typing import Final

# Series are Okabe and Ito's hues, distinct with colour blindness, darkened or lightened until they reach the contrast.
LIGHT: Final = {
    "page": "#ffffff", "panel": "#f5f7f9", "text": "#14181d", "muted": "#4c5661", "line": "#d5dbe1", "accent": "#0b5cad",
    "alert": "#a4260d",
    "series0": "#0b6bb8", "series1": "#c2410c", "series2": "#0a7d5c", "series3": "#93398a", "series4": "#7a6100",
    "series5": "#475569",
}  # fmt: skip
DARK: Final = {
    "page": "#12161b", "panel": "#1b2128", "text": "#eef2f6", "muted": "#aeb9c4", "line": "#36404b", "accent": "#7cb8f5",
    "alert": "#ff9a85",
    "series0": "#5fb0f2", "series1": "#ff9e64", "series2": "#4fd1a5", "series3": "#e79be0", "series4": "#e3c75f",
    "series5": "#a9b6c6",
}  # fmt: skip
SERIES: Final = 6
# Lines are told apart without colour, too.
DASHES: Final = ("none", "7 3", "2.5 2.5", "9 3 2 3", "4 2", "1.5 3.5")


def style_sheet() -> str:
    dark = f"@media screen and (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}"
    return f":root{{{_variables(LIGHT)}}}{dark}{_RULES}"


def _variables(palette: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in palette.items())


_RULES: Final = """
:root{color-scheme:light dark}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);font:16px/1.5 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main,header,footer{max-width:1080px;margin:0 auto;padding:0 20px}
header{padding-top:36px}footer{padding-bottom:40px;color:var(--muted);font-size:14px}
h1{font-size:30px;line-height:1.2;margin:4px 0 6px;overflow-wrap:anywhere}
h2{font-size:21px;line-height:1.3;margin:46px 0 8px}
h3{font-size:16px;line-height:1.35;margin:26px 0 4px}
p{margin:6px 0;max-width:76ch;overflow-wrap:anywhere}
a{color:var(--accent)}
.kind{color:var(--muted);font-size:14px;margin:0}
.note{color:var(--muted);font-size:14px}
.alert{color:var(--alert);font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:20px 0 4px;padding:0}
.tiles>div{background:var(--panel);border-radius:8px;padding:12px 16px}
.tiles dt{color:var(--muted);font-size:14px;margin:0}
.tiles dd{margin:0}
.tiles .value{font-size:27px;font-weight:650;line-height:1.3;
font-variant-numeric:tabular-nums;white-space:nowrap}
.tiles .more{color:var(--muted);font-size:14px}
.scroll{overflow-x:auto;margin:10px 0}
.scroll:focus-visible{outline:2px solid var(--accent)}
table{border-collapse:collapse;font-size:14.5px;font-variant-numeric:tabular-nums}
th,td{padding:5px 11px 5px 0;text-align:right;white-space:nowrap;vertical-align:top;border-bottom:1px solid var(--line)}
thead td{border-bottom:0}
thead th[colspan]{text-align:center;border-bottom:0;padding-bottom:0}
thead th{white-space:normal;color:var(--muted);font-weight:600;vertical-align:bottom}
th:first-child,td:first-child,.left{text-align:left!important}
tbody th{font-weight:600}
td small,th small{display:block;color:var(--muted);font-size:12px;font-weight:400}
table.threes tbody td:nth-child(3n+3),table.threes tr:last-child>th:nth-child(3n+3){padding-left:16px}
tr.here th,tr.here td{background:var(--panel);font-weight:650}
tr.here small{font-weight:400}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr));gap:10px 30px;margin:8px 0}
figure{margin:14px 0 0;min-width:0;max-width:480px}
figure.wide{max-width:600px}
figcaption{font-weight:650;font-size:15px;margin-bottom:4px}
figcaption span{display:block;font-weight:400;color:var(--muted);font-size:14px}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{fill:var(--text);font:12px system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
svg .axis{fill:var(--muted)}
svg .grid{stroke:var(--line);stroke-width:1}
svg .zero{stroke:var(--muted);stroke-width:1}
svg .limit{stroke:var(--alert);stroke-width:1.5;stroke-dasharray:5 4}
svg .limit-label{fill:var(--alert)}
svg .line{fill:none;stroke-width:2.2}
.legend{list-style:none;margin:8px 0 0;padding:0;font-size:13.5px;display:grid;gap:2px}
.legend.across{display:flex;flex-wrap:wrap;gap:4px 26px}
.legend li{display:flex;gap:8px;align-items:baseline}
.legend svg{width:34px;height:12px;flex:none;align-self:center}
.facts{display:grid;align-content:start;grid-template-columns:max-content minmax(0,1fr);gap:3px 18px;
margin:8px 0;font-size:14.5px}
.facts dt{color:var(--muted)}.facts dd{margin:0;overflow-wrap:anywhere}
.columns{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:0 34px}
.picture{background:#fff;border-radius:8px;padding:6px;border:1px solid var(--line)}
.picture img{display:block;width:100%;height:auto}
@media (max-width:640px){
header{padding-top:22px}h1{font-size:25px}h2{font-size:19px;margin-top:36px}
.tiles{grid-template-columns:1fr 1fr}.tiles .value{font-size:22px}
.facts{grid-template-columns:1fr}.facts dd{margin-bottom:6px}
}
@media print{
@page{size:A4;margin:13mm}
body{font-size:10pt}.tiles .value{font-size:15pt}main,header,footer{max-width:none;padding:0}header{padding-top:0}
h2{margin-top:22pt;break-after:avoid}h3{break-after:avoid}
figure,tr,.tiles,.facts{break-inside:avoid}p.note{break-after:avoid}
figure.wide{max-width:330pt}.tiles{grid-template-columns:repeat(auto-fit,minmax(80pt,1fr))}
.scroll{overflow:visible}.picture img{min-width:0!important}
table{font-size:7.2pt}th,td{padding:2.5pt 5pt 2.5pt 0}td small,th small{font-size:6.4pt}
table.threes tbody td:nth-child(3n+3),table.threes tr:last-child>th:nth-child(3n+3){padding-left:6pt}
a{color:inherit}
}
"""


def series(index: int) -> str:
    """The variable with the colour of a series, for `style` attributes."""
    return f"var(--series{index % SERIES})"
