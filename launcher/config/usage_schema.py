"""The tables `[usage]`, `[cost]` and `[audit]` of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from launcher.config.values import NonNegativeInt, PositiveInt, Section, doc

Name = Annotated[str, Meta(min_length=1)]
Amount = Annotated[float, Meta(ge=0)]
Day = Annotated[str, Meta(pattern=r"^\d{4}-\d\d-\d\d$")]


class Usage(Section, frozen=True):
    """`[usage]`: the ledger of all requests that ended."""

    enabled: Annotated[bool, doc("Keep the ledger. Without it no key can have a budget.")] = True
    path: Annotated[
        str | None,
        doc("File of the ledger, an SQLite database. Default: usage/usage.db in the state folder."),
    ] = None
    keep_days: Annotated[
        PositiveInt, doc("Days that the entry of each request is kept. Hourly sums are kept for ever.")
    ] = 30
    zone: Annotated[
        str, doc('Time zone of days, weeks and months, such as "Europe/Berlin".', min_length=1)
    ] = "UTC"
    when_unknown: Annotated[
        Literal["refuse", "allow"],
        doc(
            "While the ledger cannot be read: requests of keys with a budget, and overflow to endpoints with `max_per_day`, "
            "are refused or allowed."
        ),
    ] = "refuse"


class Price(Section, frozen=True):
    """`[cost.price]`: what a token served here takes from a key's budget in money."""

    input: Annotated[Amount, doc("Price of a million prompt tokens.")]
    output: Annotated[Amount, doc("Price of a million output tokens.")]
    cached: Annotated[
        Amount | None, doc("Price of a million cached prompt tokens. Default: that of prompt tokens.")
    ] = None


class Reference(Section, frozen=True):
    """`[[cost.reference]]`: an API to compare with."""

    name: Annotated[str, doc("Name of provider and model.", min_length=1)]
    input: Annotated[Amount, doc("Its price of a million prompt tokens.")]
    output: Annotated[Amount, doc("Its price of a million output tokens.")]
    cached: Annotated[
        float | None,
        doc("Its price of a million cached prompt tokens. Default: that of prompt tokens."),
    ] = None
    date: Annotated[Day | None, doc("Day on which these were its prices.")] = None


class Cost(Section, frozen=True):
    """`[cost]`: what this machine costs: rent by the hour, or a purchase and its energy."""

    currency: Annotated[str, doc("Currency of all amounts, such as USD or EUR.", pattern="^[A-Z]{3}$")] = (
        "USD"
    )
    hourly: Annotated[Amount | None, doc("Rent of the machine for an hour.")] = None
    purchase: Annotated[Amount | None, doc("Price of the machine, spread over `years`.")] = None
    years: Annotated[float, doc("Years of use of a purchased machine.", gt=0)] = 5.0
    watts: Annotated[
        Amount | Literal["measured"] | None,
        doc('Mean power of the machine, or "measured": that of its packages by RAPL, where it can be read.'),
    ] = None
    price_per_kwh: Annotated[Amount | None, doc("Price of a kilowatt-hour.")] = None
    price: Annotated[Price | None, doc("What a local token takes from a budget in money.")] = None
    reference: Annotated[
        tuple[Reference, ...], doc("APIs to compare with. Default: a dated table of the launcher's.")
    ] = ()


class Audit(Section, frozen=True):
    """`[audit]`: the audit trail, one JSON line for each request and each control action, chained by hashes."""

    path: Annotated[Name | None, doc("Folder of the daily files. Default: no audit trail.")] = None
    strict: Annotated[bool, doc("Refuse requests while the trail cannot be written.")] = False
    max_bytes: Annotated[PositiveInt, doc("A larger file is followed by another one of the same day.")] = (
        1 << 30
    )
    keep_days: Annotated[NonNegativeInt, doc("Days that files are kept; 0: for ever.")] = 0


# --- The table `[telemetry]` of the configuration. ---

Share = Annotated[float, Meta(ge=0, le=1)]


class Telemetry(Section, frozen=True):
    """`[telemetry]`: history of the machine's load, and traces of requests."""

    history: Annotated[
        bool,
        doc(
            "Keep the history that the dashboard shows, in the file of [usage] path: 2 s for an hour, 60 s for a day, "
            "10 minutes for 90 days."
        ),
    ] = True
    otlp_endpoint: Annotated[
        str,
        doc(
            "OpenTelemetry collector that gets traces of requests, as OTLP over HTTP, such as http://127.0.0.1:4318. "
            "Empty: no traces."
        ),
    ] = ""
    otlp_sampling: Annotated[
        Share, doc("Share of requests that are traced, if the client's `traceparent` does not decide it.")
    ] = 0.1
