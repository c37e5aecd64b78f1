import datetime
import decimal
import json
import os
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import duckdb
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollsift.pipeline import expressions
from rollsift.pipeline.expressions import evaluate, parse
from rollsift.pipeline.values import numbers
from rollsift.schemas.errors import RecipeError

ROWS = pl.DataFrame(
    {
        "acc": [0.5, 1.0, None],
        "response_length": [1, 2, 3],
        "Source": ["gsm8k", "math", None],
        "tags": [["a", "b"], [], ["b"]],
        "scores": [[1, 2], [3], []],
        "info": [{"level": 1}, {"level": 2}, {"level": 3}],
        "extra": ['{"a": {"b": 1}}', '{"a": {"b": 2.5}}', "{}"],
        "odd name.\"x'": [7, 8, 9],
        "when": [datetime.date(2024, 1, day) for day in (1, 2, 3)],
    }
)

ALLOWED = {
    "acc * response_length": [0.5, 2.0, None],
    "ACC + 0": [0.5, 1.0, None],
    "-response_length // 2 + 10 % 4": [2, 1, 1],
    "response_length ** 2 > 3 AND NOT acc < 1": [False, True, None],
    "coalesce(acc, 0) = 0 OR response_length IN (1, 5)": [True, False, True],
    "response_length NOT IN (1, 5)": [False, True, True],
    "response_length BETWEEN 2 AND 3": [False, True, True],
    "acc IS NULL": [False, False, True],
    "acc IS NOT DISTINCT FROM NULL": [False, False, True],
    "CASE WHEN acc > 0.7 THEN 1 WHEN acc > 0 THEN 2 ELSE 3 END": [2, 1, 3],
    "CASE source WHEN 'math' THEN 1 ELSE 0 END": [0, 1, 0],
    "source LIKE 'gsm%'": [True, False, None],
    "source NOT ILIKE 'GSM%'": [False, True, None],
    "source SIMILAR TO '[a-z]+'": [False, True, None],
    "regexp_matches(source, '[0-9]k$')": [True, False, None],
    "contains(Source, 'a') AND starts_with(source, 'm')": [False, True, None],
    "length(upper(source) || '!')": [6, 5, None],
    "split_part(source, '8', 1)": ["gsm", "math", None],
    "'b' IN tags": [True, False, True],
    "len(tags)": [2, 0, 1],
    "scores[1]": [1, 3, None],
    "len(scores[2:])": [1, 0, 0],
    "list_avg(scores)": [1.5, 3.0, None],
    "list_aggregate(scores, 'max')": [2, 3, None],
    "list_sum([s * 2 FOR s IN scores IF s > 1])": [4, 6, None],
    "len(list_filter(scores, lambda s: s > acc * 2))": [1, 1, 0],
    "list_reduce(scores, lambda a, b: a + b, 0)": [3, 3, 0],
    "len(list_filter([{'v': response_length}], lambda s: s['v'] > 1))": [0, 1, 1],
    "info.level * 2": [2, 4, 6],
    "info['level']": [1, 2, 3],
    "{'a': info}.a.level": [1, 2, 3],
    "(extra -> 'a' -> 'b')::DOUBLE": [1.0, 2.5, None],
    "extra ->> '$.a.b'": ["1", "2.5", None],
    "json_extract(extra, '$.a.b')": ["1", "2.5", None],
    "TRY_CAST(source AS INTEGER)": [None, None, None],
    "CAST(acc AS DECIMAL(4, 1))": [decimal.Decimal("0.5"), decimal.Decimal("1.0"), None],
    "(['1', '2']::INTEGER[])[response_length]": [1, 2, None],
    "TRY(6 // (response_length - 2))": [-6, None, 6],
    "nullif(response_length, 2)": [1, None, 3],
    "if(acc > 0.7, 1, 0)": [0, 1, 0],
    "greatest(acc, response_length, 2)": [2.0, 2.0, 3.0],
    'year("when") + ("when" > DATE \'2024-01-01\')::INT': [2024, 2025, 2025],
    '"odd name.""x\'" - 7': [0, 1, 2],
    "response_length -- the length\n * 2 /* twice */": [2, 4, 6],
    "md5_number_lower(source) % 2 >= 0": [True, True, None],
    "1e-6": [1e-6] * 3,
    "NULL": [None] * 3,
    "true": [True] * 3,
}


@pytest.mark.parametrize("text", ALLOWED)
def test_row_expressions_have_their_sql_value(text):
    """What looks at one row only is allowed and has the value that SQL gives it, row by row."""
    assert evaluate(parse(text, "metric"), ROWS, "metric").to_list() == ALLOWED[text]


REFUSED = {
    # other rows
    "acc > avg(acc)": "avg() is an aggregate; a row expression looks at one row only",
    "COUNT(*)": "count_star() is an aggregate",
    "median(acc)": "median() is an aggregate",
    "any_value(acc)": "any_value() is an aggregate",
    "abs(max(acc)) > 1": "max() is an aggregate",
    "geomean(acc)": "geomean() stands for exp(avg(ln(x))): avg() is an aggregate",
    "weighted_avg(acc, acc)": "sum() is an aggregate",
    "json_group_array(acc)": "is an aggregate",
    "sum(acc) OVER ()": "OVER opens a window",
    "row_number() OVER (ORDER BY acc)": "OVER opens a window",
    "row_number()": "row_number() is a window function",
    "sum(acc) FILTER (WHERE true)": "FILTER, DISTINCT and ORDER BY",
    "abs(DISTINCT acc)": "FILTER, DISTINCT and ORDER BY",
    "abs(acc ORDER BY acc)": "FILTER, DISTINCT and ORDER BY",
    "grouping(acc)": "GROUPING_FUNCTION is refused",
    "unnest(scores)": "there is no row function unnest()",
    "generate_subscripts(scores, 1)": "there is no row function unnest()",
    "(SELECT 1)": "a subquery",
    "EXISTS (SELECT 1)": "a subquery",
    "acc IN (SELECT 1)": "a subquery",
    "acc = ANY ([1, 2])": "a subquery",
    "ARRAY(SELECT 1)": "a subquery",
    "(VALUES (1))": "a subquery",
    "format_type(1, 1)": "a subquery",
    # chance, clock, session
    "random() < 0.5": "random() can give another value at each call",
    "uuid()": "uuid() can give another value",
    "gen_random_uuid()": "can give another value",
    "nextval('s')": "can give another value",
    "list_aggregate(scores, 'reservoir_quantile', 0.5)": "reservoir_quantile is random",
    "list_aggr(scores, 'RESERVOIR_quantile', 0.5)": "reservoir_quantile is random",
    "array_aggregate(scores, 'reservoir' || '_quantile', 0.5)": "in quotes",
    "aggregate(scores, source)": "in quotes",
    "now()": "now() depends on the clock or the session",
    "today()": "depends on the clock",
    "transaction_timestamp()": "depends on the clock",
    "current_date": "current_date depends on the clock",
    'CURRENT_TIMESTAMP > "when"': "current_timestamp depends on the clock",
    "localtime": "depends on the clock",
    "ago(INTERVAL 1 DAY)": "depends on the clock",
    'age("when"::TIMESTAMP)': "age() may change with the clock",
    "\"when\" AT TIME ZONE 'Asia/Tokyo'": "depends on the clock or the session",
    "current_setting('threads')": "depends on the clock or the session",
    "getvariable('x')": "depends on the clock or the session",
    "current_database()": "depends on the clock or the session",
    "user()": "depends on the clock or the session",
    "hash(acc)": "hash() may change",
    "version()": "version() may change",
    "collate_de(source)": "may change",
    "json_serialize_plan('SELECT 1')": "may change",
    # the outside, and internals
    "read_text('/etc/passwd')": "there is no row function read_text()",
    "getenv('HOME')": "there is no row function getenv()",
    "query('SELECT 1')": "there is no row function query()",
    "pragma_version()": "there is no row function",
    "write_log('x')": "can give another value",
    "error('x')": "can give another value",
    "pg_get_constraintdef(1)": "a subquery",
    "__internal_compress_integral_utinyint(acc)": "may change",
    "finalize(acc)": "may change",
    # names
    "*": "* and COLUMNS() stand for many columns",
    "info.*": "* and COLUMNS()",
    "COLUMNS('a.*')": "* and COLUMNS()",
    "abs(*COLUMNS(*))": "UNPACK",
    "#1": "#1 is a place",
    "?": "a parameter",
    "acc > $1": "a parameter",
    "$limit": "a parameter",
    "source.upper()": "write upper(source) for source.upper()",
    "main.abs(acc)": "write abs(main) for main.abs()",
    "system.main.random()": "write random(system.main)",
    "absolute(acc)": "there is no row function absolute()",
    "lenght(source)": "the nearest are length",
    "len([s FOR s IN [info] IF s.level > 1])": "write s['level'] for s.level",
    "len(list_filter(scores, s -> s > 1))": "write `lambda x: x + 1`",
    "extra -> 'a' = '1'": "(a -> 'path') in brackets",
    "source COLLATE nocase = 'a'": "COLLATE is refused",
    "acc::mood": "a cast to mood is refused",
    "acc::REGCLASS": "a cast to REGCLASS is refused",
    "acc::elsewhere.integer": "a cast to elsewhere.integer is refused",
    "acc::ENUM('a')": "a cast to enum is refused",
    "acc::UNION(a INT)": "a cast to UNION is refused",
    "[acc]::mood[]": "a cast to mood is refused",
    "source::TIMESTAMPTZ": "a cast to TIMESTAMPTZ is refused",
    "DEFAULT": "VALUE_DEFAULT is refused",
    # more or less than one expression
    "": "without selection list",
    " -- nothing": "without selection list",
    "acc, response_length": "it is not one expression",
    "acc,": "it is not one expression",
    "acc AS b": "syntax error",
    "acc b": "syntax error",
    "0x1f": "syntax error",
    "acc;": "syntax error",
    "acc; --": "syntax error",
    "acc; SELECT 1": "syntax error",
    "acc) + (acc": "syntax error",
    "acc) -- ": "syntax error",
    "acc /*": "unterminated",
    "'acc": "unterminated string",
    "acc FROM range(3)": "syntax error",
    "acc WHERE true": "syntax error",
    "acc LIMIT 1": "syntax error",
    "acc ORDER BY acc": "syntax error",
    "acc UNION SELECT 1": "syntax error",
    "acc USING SAMPLE 1": "syntax error",
    "DISTINCT acc": "syntax error",
    "ALL acc": "syntax error",
    "SELECT acc": "syntax error",
    "COPY (SELECT 1) TO '/tmp/x'": "syntax error",
    "acc > ": "syntax error",
    "acc\0": "a NUL character",
    "'\ud800'": "surrogate",
}


@pytest.mark.parametrize("text", REFUSED, ids=ascii)
def test_all_else_is_refused_with_what_is_wrong(text):
    """What looks beyond its row, or is no single expression, is refused before data is read."""
    with pytest.raises(RecipeError) as caught:
        parse(text, "exclude_where")
    message = str(caught.value)
    assert message.startswith("exclude_where: ")
    assert REFUSED[text].lower() in message.lower()
    assert message.endswith(f", in {text!r}")
    assert "\n" not in message


def _passes(text: str) -> bool:
    try:
        parse(text, "metric")
    except RecipeError:
        return False
    return True


def test_no_function_passes_that_duckdb_calls_otherwise():
    """Each name that DuckDB lists as an aggregate, window or volatile function is refused."""
    connection = duckdb.connect()
    listed = connection.execute(
        "SELECT DISTINCT function_name FROM duckdb_functions() WHERE stability = 'VOLATILE'"
        " OR function_type IN ('aggregate', 'window')"
        " OR function_type IN ('table', 'pragma') AND function_name NOT IN"
        " (SELECT function_name FROM duckdb_functions() WHERE function_type IN ('scalar', 'macro'))"
    ).fetchall()
    connection.close()
    assert len(listed) > 150
    assert [name for (name,) in listed if _passes(f'"{name}"(acc)')] == []


DEEP = """
import sys, threading
from rollsift.pipeline.expressions import parse
from rollsift.schemas.errors import RecipeError

def attempts():
    for text in sys.stdin.read().split(";"):
        try:
            parse(text, "metric")
        except RecipeError as error:
            print(str(error)[:80])
        else:
            print("parsed")

threading.stack_size(256 * 1024)
thread = threading.Thread(target=attempts)
thread.start()
thread.join()
"""


def _python(program: str, text: str = "", **environment: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    run = subprocess.run(
        [sys.executable, "-c", program],
        **{"input": text, "capture_output": True, "text": True, "timeout": 120},
        env=environment,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_deep_and_long_expressions_do_not_end_the_process():
    """However deep or long the text, the answer is an error, also on a small stack."""
    nested = [
        *("(" * depth + "x" + ")" * depth for depth in (300, 4_900, 10_000, 50_000)),
        *("x" + "+ x" * depth for depth in (300, 3_000)),
        *("not " * depth + "x" for depth in (300, 2_000)),
        "[" * 300 + "]" * 300,
        "abs(" * 300 + "x" + ")" * 300,
        "case when " * 300 + "x" + " then 1 end" * 300,
        "list_filter(l, lambda x: " * 300 + "x" + ")" * 300,
        "x::int" + "[]" * 4_000,
        "(" * 9_000,
        "x" * 100_000,
    ]
    answers = _python(DEEP, ";".join(nested)).splitlines()
    assert len(answers) == len(nested)
    for answer in answers:
        assert "nested more" in answer or "characters, more" in answer or "not closed" in answer


def test_what_a_person_may_write_is_not_too_deep():
    """A sum of 60 terms, 60 conditions and 60 brackets are allowed."""
    for text in ("x" + "+ x" * 60, "x" + " AND x" * 60, "(" * 60 + "x" + ")" * 60):
        assert parse(text, "metric").columns == {"x"}


def test_importing_the_module_does_not_import_duckdb():
    """DuckDB is loaded by the first expression that is parsed, not by the import."""
    program = "import rollsift.pipeline.expressions, sys; print('duckdb' in sys.modules)"
    assert _python(program) == "False\n"


@pytest.mark.parametrize(
    ("text", "columns", "bare"),
    [
        ("Acc", {"Acc"}, "Acc"),
        ("(acc)", {"acc"}, "acc"),
        ('"a b"', {"a b"}, "a b"),
        ('"now"', {"now"}, "now"),
        ("a.b", {"a"}, None),
        ("-a + b * b", {"a", "b"}, None),
        ("ACC + acc", {"ACC"}, None),
        ("list_transform(l, lambda a: a + b)", {"l", "b"}, None),
        ("list_transform(l, lambda a: list_filter(a, lambda B: b > c))", {"l", "c"}, None),
        ("list_filter(a, lambda a: a > 1)", {"a"}, None),
        ("[x + y FOR x IN l IF x > z]", {"l", "y", "z"}, None),
        ("extra -> 'a'", {"extra"}, None),
        ("nullif(a, b)", {"a", "b"}, None),
        ("{'c': a}", {"a"}, None),
        ("1", set(), None),
    ],
)
def test_columns_are_those_that_are_read(text, columns, bare):
    """`columns` are the names read as written, without lambdas' own; `bare` a lone column."""
    expression = parse(text, "metric")
    assert (expression.columns, expression.bare) == (columns, bare)


@pytest.mark.parametrize(
    ("text", "operands"),
    [
        ("(Acc)", {"Acc"}),
        ("-a + B * c / d // e % f ** g ^ h - 1", set("aBcdefgh")),
        ("a || b", set()),
        ("a > 1 AND b BETWEEN c AND d", set()),
        ("a.b * c::INT + length(d) + coalesce(e, 0)", set()),
        ("length(a * b)", {"a", "b"}),
        ("list_transform(l, lambda m: m * n)", {"n"}),
    ],
)
def test_operands_are_the_columns_beside_signs_of_arithmetic(text, operands):
    """A column that is calculated with as it stands is one, and a lone one, but none in a call."""
    assert parse(text, "metric").operands == operands


def test_unknown_names_are_told():
    """A name that no column has is an error that tells the nearest."""
    rows = pl.DataFrame({"Acc": [1], "response_length": [2], "É": [3]})
    with pytest.raises(RecipeError, match="no column respons_length; the nearest are response_len"):
        evaluate(parse("respons_length + 1", "metric"), rows, "metric")
    with pytest.raises(RecipeError, match="no column é"):
        evaluate(parse("é", "metric"), rows, "metric")


@pytest.mark.parametrize("text", ["rowid", "user", "rows.x", "t.acc", "main.acc", "temp.t.acc"])
def test_tables_and_hidden_columns_are_not_seen(text):
    """A name is a logged column or one of its fields, never a table's, a schema's or DuckDB's."""
    with pytest.raises(RecipeError, match="there is no column"):
        evaluate(parse(text, "metric"), ROWS, "metric")


def test_a_field_is_never_taken_for_another_column():
    """`rows.x` is field x of the column rows, though the rows have a column x, too."""
    rows = pl.DataFrame({"rows": [{"x": 5}], "x": [1]})
    assert evaluate(parse("rows.x + 0 * x", "metric"), rows, "metric").to_list() == [5]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("source::INTEGER", "Could not convert string 'gsm8k'"),
        ("source + 1", "No function matches"),
        ("response_length // 0", "Division by zero"),
        ("9223372036854775807 + response_length", "Overflow"),
        ("info.nothing", "nothing"),
        ("scores || 1", "metric: "),
        ("acc.level", "metric: "),
        ("abs(acc, acc)", "No function matches"),
        ("'now'::TIMESTAMP = \"when\"", "now"),
        ("'today'::DATE = \"when\"", "today"),
        ("lambda x: x", "lambda"),
        ("tags || ['c']", "it gives VARCHAR[], not a number, true or false"),
        ('"when" + 1', "it gives DATE"),
        ("{'a': acc}", "it gives STRUCT"),
        ("INTERVAL 1 DAY", "it gives INTERVAL"),
        ("99999999999999999999999999999999999999999999", "it gives BIGNUM"),
    ],
)
def test_what_cannot_be_evaluated_is_an_error_of_the_recipe(text, problem):
    """A failure at evaluation names the key, the expression and DuckDB's first line."""
    with pytest.raises(RecipeError) as caught:
        evaluate(parse(text, "metric"), ROWS, "metric")
    message = str(caught.value)
    assert message.startswith("metric: ")
    assert problem in message
    assert message.endswith(f", in {text!r}")
    assert "\n" not in message


def test_values_stand_in_the_order_of_the_rows():
    """Row i has value i, however many rows and threads there are."""
    rows = pl.DataFrame({"x": range(1_000_000)}).sample(fraction=1.0, shuffle=True, seed=1)
    assert evaluate(parse("x * 2", "metric"), rows, "metric").equals(rows["x"] * 2)


def test_a_value_does_not_depend_on_the_batch():
    """Rows evaluated at once, in parts, in another order or alone have the same values."""
    rows = pl.DataFrame({"x": [0.1, None, 3.0, -2.0] * 700, "t": ["a", "b", None, "c"] * 700})
    for text in ("x * 3 - 1", "greatest(x, 1)", "md5_number_lower(t) % 7", "TRY(1 // (x::INT))"):
        expression = parse(text, "metric")
        whole = evaluate(expression, rows, "metric")
        parts = [evaluate(expression, rows[a : a + 999], "metric") for a in range(0, 2800, 999)]
        assert whole.equals(pl.concat(parts))
        assert whole.reverse().equals(evaluate(expression, rows.reverse(), "metric"))
        assert whole[2:3].equals(evaluate(expression, rows[2:3], "metric"))


def test_threads_do_not_see_each_others_rows():
    """Evaluations at the same time each have their own rows."""
    expression = parse("x + 1", "metric")

    def one(number: int) -> bool:
        rows = pl.DataFrame({"x": [number] * 1000})
        return evaluate(expression, rows, "metric").equals(rows["x"] + 1)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(200)))


def test_no_rows_have_no_values():
    """An empty step is evaluated to an empty column, constants included."""
    for text in ("acc", "acc + 1", "1"):
        assert evaluate(parse(text, "metric"), ROWS.clear(), "metric").to_list() == []


@pytest.mark.parametrize(
    ("values", "text", "expected"),
    [
        (pl.Series([None, None]), "x IS NULL", [True, True]),
        (pl.Series([0.5, 2.0], dtype=pl.Float16), "x * 2", [1.0, 4.0]),
        (pl.Series([1, 2**64 - 1], dtype=pl.UInt64), "x > 5", [False, True]),
        (pl.Series([1, 2**70], dtype=pl.Int128), "x > 5", [False, True]),
        (pl.Series(["a", "b"], dtype=pl.Categorical), "x = 'b'", [False, True]),
        (pl.Series(["a", "b"], dtype=pl.Enum(["a", "b"])), "x = 'b'", [False, True]),
        (pl.Series([b"a", b"bb"]), "octet_length(x)", [1, 2]),
        (pl.Series([[1, 2], [3, 4]], dtype=pl.Array(pl.Int8, 2)), "x[2]", [2, 4]),
        (pl.Series([{"a": [1]}, {"a": None}]), "len(x.a)", [1, None]),
        (pl.Series([datetime.timedelta(1), None]), "x > INTERVAL 2 HOUR", [True, None]),
        (pl.Series([decimal.Decimal("1.5"), None]), "x = 1.5", [True, None]),
        (pl.Series(["a\0b", "é"]), "length(x)", [3, 1]),
    ],
)
def test_logged_types_reach_duckdb(values, text, expected):
    """Columns of the types that logs have can be used, next to columns that cannot."""
    rows = pl.DataFrame({"x": values, "unused": pl.Series([object(), object()], dtype=pl.Object)})
    assert evaluate(parse(text, "metric"), rows, "metric").to_list() == expected


def test_the_session_is_locked():
    """The connection reads no file and no Python variable, loads nothing and keeps its settings."""
    secret = pl.DataFrame({"x": [1]})
    connection = expressions._database()
    for sql in (
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM secret",
        "COPY (SELECT 1) TO '/tmp/rollsift-expressions.csv'",
        "INSTALL httpfs",
        "SET enable_external_access = true",
        "SET TimeZone = 'Asia/Tokyo'",
        "SET lock_configuration = false",
    ):
        with connection.cursor() as cursor, pytest.raises(duckdb.Error):
            cursor.execute(sql)
    assert len(secret) == 1


def test_times_are_in_utc_wherever_it_runs():
    """The machine's time zone does not change a value."""
    program = """
import datetime, polars as pl
from rollsift.pipeline.expressions import evaluate, parse
rows = pl.DataFrame({"x": [datetime.datetime(2024, 1, 1, 23, tzinfo=datetime.UTC)]})
print(evaluate(parse("strftime(x, '%d %H')", "metric"), rows, "metric")[0])
"""
    assert _python(program, TZ="Asia/Tokyo") == _python(program, TZ="UTC") == "01 23\n"


# SQL texts with what they mean in Python: (text, function of a row).
def _leaf(name):
    return st.just((name, lambda row: row[name]))


def _literal(number):
    return st.just((f"({number}::DOUBLE)", lambda _: float(number)))


def _known(*values):
    return all(value is not None for value in values)


def _operation(pair):
    sign, (left, a), (right, b) = pair
    compute = {"+": lambda x, y: x + y, "-": lambda x, y: x - y, "*": lambda x, y: x * y}[sign]

    def value(row):
        x, y = a(row), b(row)
        return compute(x, y) if _known(x, y) else None

    return f"({left} {sign} {right})", value


def _case(triple):
    (left, a), (right, b), (other, c) = triple

    def value(row):
        x, y = a(row), b(row)
        return x if _known(x, y) and x < y else c(row)

    return f"(CASE WHEN {left} < {right} THEN {left} ELSE {other} END)", value


def _coalesce(pair):
    (left, a), (right, b) = pair
    return f"coalesce({left}, {right})", lambda row: b(row) if a(row) is None else a(row)


TERMS = st.recursive(
    st.one_of(_leaf("a"), _leaf("b"), st.integers(-9, 9).flatmap(_literal)),
    lambda term: st.one_of(
        st.tuples(st.sampled_from("+-*"), term, term).map(_operation),
        st.tuples(term, term, term).map(_case),
        st.tuples(term, term).map(_coalesce),
        term.map(lambda t: (f"(-{t[0]})", lambda row: None if t[1](row) is None else -t[1](row))),
        term.map(lambda t: (f"abs({t[0]})", lambda row: t[1](row) and abs(t[1](row)))),
    ),
    max_leaves=12,
)
CELLS = st.one_of(st.none(), st.floats(-1e6, 1e6))


@settings(max_examples=150, deadline=None)
@given(term=TERMS, rows=st.lists(st.tuples(CELLS, CELLS), max_size=8))
def test_arithmetic_equals_pythons(term, rows):
    """Any formula over any rows has, bit for bit up to the sign of zero, the value of Python's."""
    text, value = term
    table = pl.DataFrame(rows, schema={"a": pl.Float64, "b": pl.Float64}, orient="row")
    found = evaluate(parse(text, "metric"), table, "metric").to_list()
    assert found == [value({"a": a, "b": b}) for a, b in rows]


def _as_number(text):
    """The oracle: JSON's own reader, Python's two words, numpy's for what is not finite."""
    if text in ("True", "False"):
        return float(text == "True")
    if text in ("nan", "inf", "-inf"):
        return float(text)
    if text != text.strip() or not text.isascii():
        return None
    try:
        value = json.loads(text, parse_int=float)
    except ValueError:
        return None
    return float(value) if isinstance(value, (bool, float)) else None


# fmt: off
WORDS = [
    "True", "true", "TRUE", "False", "false", "NaN", "nan", "Infinity", "-Infinity", "inf", "null",
    "None", "", " 1", "1\n", "1 ", "+1", "01", "1.", ".5", "1e400", "-1e400", "-0", "٣", "1_0",
    "9007199254740993", "2.4703282292062328e-324", "1" * 400, "0x1", "[1]", '"1"',
]
# fmt: on
NUMBER_LIKE = st.one_of(
    st.floats().map(repr),
    st.floats().map(json.dumps),
    st.integers().map(str),
    st.from_regex(r"-?[0-9]{1,40}(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,4})?", fullmatch=True),
    st.text("0123456789+-.eE_ xTrueFalsNI", max_size=8),
    st.text(max_size=4),
    st.sampled_from(WORDS),
)


def _bits(values):
    return [None if v is None else "nan" if v != v else struct.pack("<d", v) for v in values]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.none(), NUMBER_LIKE), max_size=12))
def test_text_is_read_as_json_reads_numbers(texts):
    """Text is the number that JSON's reader makes of it, rounded once, or null."""
    read, from_text = numbers(pl.Series("score", texts, pl.String))
    expected = [None if text is None else _as_number(text) for text in texts]
    assert read.name == "score"
    assert read.dtype == pl.Float64
    assert _bits(read) == _bits(expected)
    assert from_text == sum(value is not None for value in expected)


@settings(deadline=None)
@given(st.integers(-(10**37), 10**37), st.integers(0, 37))
def test_decimals_are_rounded_once(digits, scale):
    """A decimal, which SQL's `0.1 * x` gives, becomes the nearest float."""
    value = decimal.Decimal(f"{digits}e-{scale}")
    read = numbers(pl.Series([value], dtype=pl.Decimal(38, scale)))[0]
    assert read.to_list() == [float(value)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pl.Series([True, None, False]), [1.0, None, 0.0]),
        (pl.Series([1, None, -3], dtype=pl.Int8), [1.0, None, -3.0]),
        (pl.Series([2**64 - 1], dtype=pl.UInt64), [float(2**64 - 1)]),
        (pl.Series([0.5, None], dtype=pl.Float32), [0.5, None]),
        (pl.Series([None, None]), [None, None]),
        (pl.Series([], dtype=pl.String), []),
        (pl.Series([None, [1], [2]]), [None, None, None]),
        (pl.Series([None, None], dtype=pl.List(pl.Int64)), [None, None]),
        (pl.Series([{"a": 1}]), [None]),
        (pl.Series([None, datetime.date(2024, 1, 1)]), [None, None]),
        (pl.Series([b"1"]), [None]),
        (pl.Series([None, object()], dtype=pl.Object), [None, None]),
    ],
)
def test_other_types_are_numbers_or_null(values, expected):
    """Booleans and numbers of every width are numbers; lists, structs, times and bytes are not."""
    read, from_text = numbers(values)
    assert (read.to_list(), from_text) == (expected, 0)
    assert read.dtype == pl.Float64


def test_categories_are_read_as_their_text():
    """Text that is stored as categories is read like other text."""
    for dtype in (pl.Categorical, pl.Enum(["1.5", "True", "x"])):
        values = pl.Series(["1.5", None, "True", "x", "x"], dtype=dtype)
        read, from_text = numbers(values)
        assert (read.to_list(), from_text) == ([1.5, None, 1.0, None, None], 2)
