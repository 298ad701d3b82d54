"""Planted secrets in arguments, programs, texts and the environment; and what must stay."""

from __future__ import annotations

import ast
import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from ampscope import masks, privacy

X = "Hq7TAILv2"  # the secret; a second part of one is TAIL, which no kept text holds


@pytest.fixture(autouse=True)
def _nothing_hidden(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(masks, "_hidden", [])
    monkeypatch.setattr(masks, "_environment", {})
    monkeypatch.setattr(masks, "_arguments", [])
    masks.masked_text.cache_clear()
    yield
    masks.masked_text.cache_clear()


HEX = "3f786850e387550fdab836ed7e6dc881de23001b"
ARGUMENTS: list[tuple[str, ...]] = [
    # the value as the next argument
    ("--token", X),
    ("--hf-token", X),
    ("--hf_token", X),
    ("--apiKey", X),
    ("--api-key", X),
    ("--password", X),
    ("--passwd", X),
    ("--passphrase", X),
    ("--passwords", X),
    ("--passwords", "other1", X),
    ("--secret", X),
    ("--client-secret", X),
    ("--secrets", X, X),
    ("--credential", X),
    ("--credentials", X),
    ("--auth", X),
    ("--use-auth-token", X),
    ("--accesskey", X),
    ("--secretkey", X),
    ("--privatekey", X),
    ("--access-key", X),
    ("--private_key", X),
    ("--db.password", X),
    ("-password", X),
    ("--pw", X),
    ("--pwd", X),
    ("--cookie", X),
    ("--token", f"--{X}"),
    ("--token", "--lowercase-tail"),
    ("--password", f"-{X}"),
    ("--password", f"--pass={X}"),
    ("--password", f"a {X}"),
    ("--token", ""),
    ("--token", f"{{{X}}}"),
    ("--lr", "1", "--token", X, "--epochs", "2"),
    # behind a sign
    (f"--token={X}",),
    (f"--password=abc,{X}",),
    (f"--password=abc&{X}",),
    (f"--password=abc'{X}",),
    (f'--password=abc"{X}',),
    (f"--password=abc}}{X}",),
    (f"--password=abc{{{X}",),
    (f"--password=abc {X}",),
    (f"--password=abc;{X}",),
    (f"--password=abc={X}",),
    (f"--password=abc:{X}",),
    (f"--password=abc\n{X}",),
    (f"--password=abc)({X}",),
    (f"--password='abc'{X}",),
    (f'--password="abc" {X}',),
    (f"--password= {X}",),
    (f"password:{X},{X}",),
    (f"--accesskey={X}",),
    (f"--secretkey={X}",),
    (f"--privatekey={X}",),
    (f"--passwords=a,{X}",),
    (f"AWS_SECRET_ACCESS_KEY={X}",),
    (f"logger.wandb.api_key={X}",),
    (f"+hub.token={X}",),
    (f"--config=logger.api_key={X}",),
    (f"--set=a=1,b.token='{X}',c=2",),
    (f"--opts=token=abc,secret={X},lr=1",),
    (f"env TOKEN={X} python train.py",),
    # lists and objects
    (f'{{"token": "{X}"}}',),
    (f'{{"hub": {{"token": "{X}"}}, "lr": 1}}',),
    (f'{{"password": "a,{X}\\"{X}"}}',),
    (f'--config={{"api_key": "{X}", "lr": 0.1}}',),
    (f"{{token: {X}, lr: 1}}",),
    (f"{{token: {X},{X}}}",),
    (f"{{'passwords': ['a', '{X}']}}",),
    (f'[{{"password": "{X}"}}]',),
    # addresses
    (f"https://me:{X}@host.org/x?y=1",),
    (f"https://me:p@{X}@host",),
    (f"https://me:p/{X}@host",),
    (f"https://me:p?{X}@host",),
    (f"https://me:p#{X}@host.org/a",),
    (f"https://me:p@a/{X}@host.org/x",),
    (f"https://me:p {X}@host",),
    (f"--url=https://me:p,{X}@host.org",),
    (f"s3://{X}@bucket/data",),
    (f"git+https://{X}@github.com/o/r@v1.0",),
    (f"postgresql+psycopg2://u:{X}@10.0.0.1:5432/db",),
    (f"https://host.org/x?token={X}&k=1",),
    (f"https://host.org/x?a=1&password=abc&{X}",),
    (f"https://x.blob.core.windows.net/c?sv=1&sig={X}",),
    (f"https://b.s3.amazonaws.com/k?X-Amz-Signature={X}&a=b",),
    # headers and forms
    ("--header", f"Authorization: Bearer {X}"),
    ("-H", f"Authorization: token {X}"),
    ("-H", f"X-Api-Key: {X}"),
    ("--header", f"Bearer {X}"),
    ("-H", f"Cookie: a=b; session={X}"),
    (f"--cmd=curl --token {X} host",),
    ("push", "hf_" + X + "a" * 20),
    ("push", "ghp_" + X * 3),
    ("push", "glpat-" + X + "a" * 12),
    ("push", "AIza" + X + "b" * 26),
    ("push", "sk-" + X * 3),
    ("push", "xoxb-" + X * 2),
    ("push", "gsk_" + X * 4),
    (f"-----BEGIN RSA PRIVATE KEY-----\n{X}\n-----END RSA PRIVATE KEY-----",),
    # other names
    ("--cookies", f"sid={X}"),
    ("--token-id", X),
    ("--api-token-id", X),
    ("--hf_token_id", X),
    ("--oauth", X),
    ("--masterkey", X),
    ("--sessionkey", X),
    ("--signingkey", X),
    # several in one
    (f"https://a:P@h1,https://b:{X}@h2",),
    (f"--proxy=http=http://a:p@h1;https=http://b:{X}@h2",),
    (f"https://h1?next=https://me:{X}@h2",),
    ("--cmd", "run --password tail"),
    ("--cmd=run --password tail",),
    ('["--password","tail"]',),
    ("--password=***,TAIL",),
]


def test_the_lists_are_as_long_as_they_are_said_to_be() -> None:
    assert len(ARGUMENTS) >= 84
    assert len(SOURCES) >= 46
    assert len(HARMLESS) >= 60


@pytest.mark.parametrize("args", ARGUMENTS)
def test_no_planted_secret_stays_in_arguments(args: tuple[str, ...]) -> None:
    found = masks.masked(args)
    assert "TAIL" not in str(found)
    assert "tail" not in str(found)
    assert len(found) == len(args)
    assert masks.masked(found) == found


@pytest.mark.parametrize("args", [args for args in ARGUMENTS if X in "".join(args)])
def test_an_error_that_quotes_the_argument_is_stored_without_it(args: tuple[str, ...]) -> None:
    masks.hide_secrets_of(args)
    for arg in args:
        assert "TAIL" not in masks.masked_text(f"refused: {arg!r}")


WANDB = [("--wandb-key", HEX), (f"wandb login {HEX}",), (f"WANDB_API_KEY={HEX}",)]


@pytest.mark.parametrize("args", WANDB)
def test_forty_digits_are_masked_behind_the_name_of_their_maker(args: tuple[str, ...]) -> None:
    assert HEX not in str(masks.masked(args))


KEPT_ARGUMENTS = [
    ("--lr", "3e-4", "--epochs=5"),
    ("--max-tokens", "512", "--tokenizer", "gpt2"),
    ("--key-dim", "64", "--num-keys=8"),
    ("--token-file", "token.txt", "--token-budget=4096"),
    ("--auth", "--lr", "1"),
    ("--use-auth-token", "--lr", "1"),
    ("data:8080", "https://host.org/a@b", "monkey=1", "--author=me"),
    ("http://localhost:8080/a@b", "http://10.0.0.1:29500/x@y"),
    ("git+https://github.com/o/r@v1.0", f"--commit={HEX}", f"--revision={HEX}"),
    ("--pad-token", "<pad>", "--eos_token=</s>", "--pad-token-id", "0", "--token-id", "50256"),
    ("--boi_token_id=255999", "--eot_token_id=128009", "--boi_token_id", "255999"),
    ('--cfg={"boi_token_id": 255999}', "{'eot_token_id': '128009', 'lr': 1}"),
    ("--eot_token_id=[128001,128009]", '{"eot_token_id": [128001, 128009]}'),
    ("--per-token-loss", "true", "--label-key=y", "--sort-key", "date"),
    ("--run", "123e4567-e89b-12d3-a456-426614174000"),
    ('{"lr": 0.1, "betas": [0.9, 0.95]}', "{a: 1}"),
    ("model.optimizer.lr=0.1", "+trainer=ddp", "~logger"),
    (
        "--name",
        "basic training",
        "--password",
    ),
    ("--checkpoint_key", "teacher", "--csv-img-key", "filepath", "--checkpoint_key=teacher"),
    ("--token_mixer", "attention", "--token_list", "a/b.txt", "model.token_mixer=pooling"),
    ("--mm_use_im_patch_token", "True", "--use-auth-token", "False", "--my_token=false"),
    ("--model-kwargs", "class_token=False", "reg_token=1", "--dist-token", "True"),
    ("--cls_pw", "1.0", "obj_pw=0.5", "--token-position", "first"),
    ('{"image_key": 3, "checkpoint_key": "teacher"}',),
    ("-m", "a b -- c", "/data/imagenet/train", "runs/2026-01-01_key"),
]


@pytest.mark.parametrize("args", KEPT_ARGUMENTS)
def test_harmless_arguments_stay(args: tuple[str, ...]) -> None:
    assert masks.masked(args) == args


# --- programs

SOURCES = [
    f'API_KEY = "{X}"',
    f"API_KEY = '{X}'",
    f'password: str = "{X}"',
    f'password: str | None = "{X}"',
    f'x: SecretStr = "{X}"',
    f'def f(token: str = "{X}"): pass',
    f'def f(*, password="{X}"): pass',
    f'def f(a, /, secret: str | None = "{X}", b=1): pass',
    f'f = lambda password="{X}": 1',
    f'parser.add_argument("--token", default="{X}")',
    f'parser.add_argument("-t", "--hf-token", type=str, default="{X}", help="your token")',
    f'@click.option("--password", default="{X}")\ndef f(): pass',
    f'token = os.environ.get("T") or "{X}"',
    f'token = args.token or "{X}"',
    f'token = os.environ.get("T", "{X}")',
    f'os.environ.get("TOKEN", "{X}")',
    f'os.getenv("DB_PASSWORD", "{X}")',
    f'os.environ["HF_TOKEN"] = "{X}"',
    f'os.environ.setdefault("HF_TOKEN", "{X}")',
    f'password = """{X}"""',
    f"password = '''{X}'''",
    f'password = """a\n{X}\nb"""\nlr = 1',
    f'user, password = "a", "{X}"',
    f'(user, (host, password)) = "a", ("b", "{X}")',
    f'user, password = ["a", "{X}"]',
    f'user, password = "a:{X}".split(":")',
    f'a = password = "{X}"',
    f'if (token := "{X}"): pass',
    f'wandb.login(key="{X}")',
    f'wandb.login("{X}")',
    f'huggingface_hub.login("{X}")',
    f'{{"password": "{X}"}}',
    f'config = dict(token="{X}", lr=1)',
    f'headers = {{"Authorization": "Bearer {X}"}}',
    f'headers = [("Authorization", "{X}")]',
    f'sys.argv = ["x", "--token", "{X}"]',
    f'password = "abc" "{X}"',
    f'password = ("abc"\n    "{X}")',
    f'password = "abc" + "{X}"',
    f'password = f"abc{{n}}{X}"',
    f'password = b"{X}"',
    f'password = r"{X}" if debug else "{X}"',
    f'secret = b64decode("{X}")',
    f'password = "{X}".strip()',
    f'self.password = "{X}"',
    f'self.secrets["a"] = "{X}"',
    f'client.set_password("svc", "{X}")',
    f'setattr(config, "token", "{X}")',
    f'requests.get(url, auth=("me", "{X}"))',
    f'assert args.password == "{X}"',
    f'if password in ("a", "{X}"): pass',
    f'passwords = ["a", "{X}"]',
    f'for password in ("a", "{X}"): pass',
    f'def get_password():\n    return "{X}"',
    f'class C:\n    api_key: str = field(default="{X}")',
    f'url = "https://me:{X}@host/x"',
    f'url = "https://me:p@{X}@host"',
    f'db = "Server=x;Password={X}"',
    f'run("train.py --token {X} --lr 1")',
    f"# password: {X}",
    f"lr = 1  # password={X}",
    f'"""Use password={X} here."""',
    f"login('hf_{X}{'a' * 24}')",
    f'x = "glpat-{X}aaaaaaaaaaaa"',
    f'key = "{X}"',
    f'é = "ü"; password = "é{X}"; lr = 1',
    f'accesskey = "{X}"',
    f'client = Client(secretkey="{X}")',
    f'requests.get(url, cookies={{"session": "{X}"}})',
    'os.system("x --password TAIL")',
    f'proxies = "http=http://a:p@h1;https=http://b:{X}@h2"',
    'json.loads("{\\"password\\": \\"TAIL\\"}")',
    # what stands in for a secret that is read
    f'print(args.token or "{X}")',
    'client = Client(args.api_token or "TAIL")',
    'f(cfg.get("api_key") or "TAIL")',
    f'f(config["token"] or "{X}")',
    'f(os.getenv("HF_TOKEN") or x or "TAIL")',
    f'f(x if args.token else "{X}")',
    'f("TAIL" if args.password is None else x)',
    # other places of a name
    'x: SecretStr = "TAIL"',
    'x = SecretStr("TAIL")',
    'x: "Password" = "TAIL"',
    'for user, password in [("a", "TAIL")]: pass',
    'x = typer.Option("TAIL", "--password")',
    'os.getenv(key="DB_PASSWORD", default="TAIL")',
    '{"name": "password", "value": "TAIL"}',
    'parser.add_argument("--x", dest="password", default="TAIL")',
    'parser.add_argument("--password", **{"default": "TAIL"})',
    # a private key, line by line
    'k = ("-----BEGIN RSA PRIVATE KEY-----\\n"\n"TAIL\\n"\n"-----END RSA PRIVATE KEY-----")',
    'k = ("-----BEGIN RSA PRIVATE KEY-----\\n" +\n"TAIL\\n" +\n"-----END RSA PRIVATE KEY-----")',
    'k = "\\n".join(["-----BEGIN PRIVATE KEY-----", "TAIL", "-----END PRIVATE KEY-----"])',
]
BROKEN = [  # no programs, or parts of one
    f'    lr="1", password="{X}")',
    f'parser.add_argument("--token", default="{X}",',
    f'    token: str = "{X}",',
    f'    "password": "{X}",',
    f'print "a"\npassword = "{X}"\n',
    f'print "a"\npassword: str = """{X}\n{X}"""\n',
    f'def f(:\n    password = "{X}"\n    token = x or "{X}"\n',
    f'lr = 1\npassword = "{X}"\nwith (',
    f'else: password = "{X}"',
    f'  "password": "{X}"}}, ((',
]


@pytest.mark.parametrize("source", [*SOURCES, *BROKEN])
def test_no_planted_secret_stays_in_a_program(source: str) -> None:
    found = masks.masked_source(source)
    assert "TAIL" not in found
    assert found.count("\n") == source.count("\n")
    assert masks.masked_source(found) == found


@pytest.mark.parametrize("source", SOURCES)
def test_a_masked_program_has_the_same_names_at_the_same_lines(source: str) -> None:
    def names(text: str) -> list[tuple[int, str]]:
        found = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)]
        return [(name.lineno, name.id) for name in found]

    if "{n}" not in source:  # an f-string is masked as a whole
        assert names(masks.masked_source(source)) == names(source)


@pytest.mark.parametrize("source", SOURCES)
def test_one_secret_in_a_long_program_leaves_the_other_lines(source: str) -> None:
    before = "import os\n\nclass A:\n    key = 3\n\n"
    after = "\nkey = self.key(x)\nloss = model(x)  # the loss\n"
    found = masks.masked_source(before + source + after)
    assert "TAIL" not in found
    assert found.startswith(before)
    assert found.endswith(after)


HARMLESS_SOURCES = [
    "key = self.key(x)",
    "tokens = tokenizer(text)",
    "q, k = w['query'], w['key']",
    "mode = 'train'  # key",
    "password = self.password",
    "token = os.environ['HF_TOKEN']",
    "token = os.getenv('HF_TOKEN')",
    "password = getpass('Password: ')",
    "token = open('token.txt').read().strip()",
    "key = rearrange(self.key(x), 'b t (h d) -> b h t d', h=8)",
    "key = torch.einsum('bqd,bkd->bqk', q, k)",
    "for key in ('weight', 'bias'): print(key)",
    "if key == 'weight': continue",
    "if token == 'hello': continue",
    "num_tokens = 5",
    'pad_token = "<pad>"',
    'boi_token_id = "255999"',
    'tokenizer.add_special_tokens({"pad_token": "[PAD]"})',
    "best = max(xs, key=lambda x: x[0])",
    "scores = scores.masked_fill(mask, float('-inf'))",
    "target_modules = ['query', 'key', 'value']",
    "parser.add_argument('--max-tokens', type=int, default='512')",
    "parser.add_argument('--tokenizer', default='gpt2')",
    "parser.add_argument('--lr', default='3e-4', help='the key')",
    "raise KeyError('weight')",
    f"COMMIT = '{HEX}'",
    "model = AutoModel.from_pretrained('bert-base-uncased', revision='v1.0')",
    "state = ckpt['model']['attn.key.weight']",
    "x = f'{key}: {value}'",
    "print(f'token={token}', 'password={}'.format(p), 'password: %s' % p)",
    'key_states = rearrange(k, "b n (h d) -> b h n d")',
    'token_emb = zeros(n, device="cuda")',
    'token_embedding = nn.Parameter(torch.zeros(1), "cuda:0")',
    'dataset(key="image")',
    'if a: pass\nelif key == "weight": pass',
    '    elif key == "weight":',
    'elif key == "weight": return 1',
    'q_key = rearrange(x, "b n (h d) -> b h n d")',
    'checkpoint_key = "teacher"',
    'def f(kind: CheckpointKey = "teacher"): pass',
    'kind: CheckpointKey = "teacher"',
    'parser.add_argument("--checkpoint_key", default="teacher")',
    'class_token = self.f("bilinear")',
    "    return x",
    "",
    'print("with" if args.password else "without")',
    'token = "cls" if token is None else token',
    'f(key or "layer1", kw.get(key) or "layer2", "attn1" if key == "k" else x)',
    'self.mixer = token or "mean"',
    'for key, value in [("layer1", "layer2")]: pass',
    '{"name": "token", "value": "mean"}',
    'f(name="key", default="layer1")',
    "@torch.no_grad()",
    "else:",
    "}",
]


@pytest.mark.parametrize("source", HARMLESS_SOURCES)
def test_harmless_lines_of_a_program_stay(source: str) -> None:
    assert masks.masked_source(source) == source


# --- texts

TEXTS = [
    f"RuntimeError: user password=hunter2{X}",
    f"user password={X} is wrong",
    f"password: {X}",
    f"password = '{X} {X}'",
    f"login failed (password={X}, user=me)",
    f"{{'token': '{X}', 'lr': 1}}",
    f'{{"api_key": "{X}"}}',
    f"Bearer {X}",
    f"the header was 'Authorization: Bearer {X}'",
    f"Authorization: Basic {X}==",
    f"Authorization: token {X}, sent",
    f"Cookie: a=b; session={X}",
    f"https://me:{X}@host.org refused",
    f"cannot clone 'https://me:p@{X}@host'",
    f"cannot clone https://me:p/{X}@host: no",
    f"GET https://host.org/x?token={X}&k=1 gave 401",
    f"api_key={X}",
    f"API_KEY={X},",
    f"token={X}",
    f"invalid token: {X}",
    f"hf_token: {X}",
    f"access_key={X} secret_key={X}",
    f"train.py --token {X} --lr 1 failed",
    f"train.py --password={X}",
    f"db://u:{X}@h/d",
    f"key glpat-{X}aaaaaaaaaaaa is old",
    f"key AIza{X}{'a' * 30} is old",
    f"-----BEGIN PRIVATE KEY-----\n{X}\n-----END PRIVATE KEY-----",
    f"[passphrase={X}]",
    f"passwd:{X}",
    f"https://a:P@h1,https://b:{X}@h2",
    f"http=http://a:p@h1;https=http://b:{X}@h2",
    f"https://h1?next=https://me:{X}@h2",
    f"[https://a:P@h1|https://b:{X}@h2]",
    # lists
    "Command '['mysqldump', '--password', 'TAIL']' returned non-zero exit status 1.",
    f"Command '['mysqldump', '--token', '{X}']' timed out after 1 seconds",
    f"('X-Api-Key', '{X}')",
    f'["token","{X}"]',
    "[('Authorization', 'TAIL')]",
    f"argument --token: invalid choice: '{X}' (choose from 'a', 'b')",
    f"argument -t/--token: invalid int value: '{X}'",
    "Invalid value for '--password': 'TAIL' is not one of 'a'",
    # plain words behind sure names
    "--password TAIL",
    "x --password 'a TAIL' is wrong",
    "train.py --api-key TAIL",
    "api_key: TAIL",
    "HF_TOKEN: TAIL",
    "x-amz-security-token: TAIL",
    # values that begin like a placeholder
    f"password=%{X}!",
    f"password=${X}",
    f"password={{{X}",
    f"password=<{X}",
    "password=***,TAIL",
    f"password=p}}}}{X}",
    f"'password': b'p {X}'",
    f"password=['p', '{X}']",
    f"password='p\n{X}'",
    f'password="""p {X}"""',
    "password=[TAILx]",
    # brackets in quoted texts, and long ones
    f"passwords=['ab)c', '{X}']",
    f"password=['ab){X}']",
    f"{{'password': ['a', 'x}}y', '{X}']}}",
    f"passwords=['a', ('b', 'c'), '{X}']",
    f"passwords=['a', '{X}'",
    f"passwords=['a\\\\', '{X}']",
    f'password="{"word " * 250}{X}"',
    f"passwords=['{'word ' * 250}', '{X}']",
    f"password='p\\' {X}'",
    f"api_keys: ['abc', '{X}']",
]


@pytest.mark.parametrize("text", TEXTS)
def test_no_planted_secret_stays_in_a_text(text: str) -> None:
    found = masks.masked_text(text)
    assert "TAIL" not in found
    assert masks.masked_text(found) == found


def test_a_user_and_a_password_behind_basic_are_masked() -> None:
    given = base64.b64encode(f"me:{X}".encode()).decode()
    for value in (given, given.rstrip("=")):
        assert masks.masked_text(f"sent Basic {value}") == "sent Basic ***"
        assert masks.masked(("-H", f"Basic {value}")) == ("-H", "Basic ***")


HARMLESS = [
    "",
    "3e-4",
    "encoder.layer.0.attention.self.key",
    "encoder.layer.0.attention.self.key: 12 of 4,096 elements are NaN",
    "decoder.key_proj.weight: norm 3.4",
    "/data/imagenet/train/n01440764/n01440764_10026.JPEG",
    "No such file: /home/me/keys/token.txt",
    "--tokenizer gpt2",
    "--max-tokens 512",
    "num_tokens=5",
    "key=lambda x: x",
    'pad_token="<pad>"',
    "eos_token='</s>', bos_token='<s>'",
    "bert-base-uncased",
    "meta-llama/Llama-3.1-8B-Instruct",
    f"commit {HEX}",
    f"wandb run at commit {HEX}",
    f"sha1: {HEX}",
    f"revision={HEX}",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "123e4567-e89b-12d3-a456-426614174000",
    "1a33380be1c2",
    "run-2026-11-27_12-00-00",
    "KeyError: 'token'",
    "KeyError: 'model.layers.0.weight'",
    "missing key: layer.weight",
    'Unexpected key(s) in state_dict: "a.weight", "b.bias"',
    "Missing key(s) in state_dict: 'key.weight'",
    "f() got an unexpected keyword argument 'token'",
    "unknown token: hello",
    "Unexpected token: <",
    "argument --token: expected one argument",
    "unrecognized arguments: --password",
    "pass --token to read private models",
    "the bearer of the name",
    "a basic block of the network",
    "Basic usage: see the docs",
    "bearer token required",
    "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 79.15 GiB total)",
    "mat1 and mat2 shapes cannot be multiplied (4x3 and 2x1)",
    "Expected all tensors on the same device, cuda:0 and cpu!",
    "RuntimeError: expected scalar type Half but found Float",
    "http://localhost:6006/ is busy",
    "see https://pytorch.org/docs/stable/amp.html#gradient-scaling",
    "https://huggingface.co/gpt2/resolve/main/config.json?download=true",
    "https://github.com/o/r/blob/main/train.py?plain=1#L10",
    "train.py:41",
    'File "/home/me/train.py", line 3, in key',
    "aten._to_copy",
    "torch.nn.functional.scaled_dot_product_attention",
    "key = self.key(x)",
    "query, key, value = (batch, 8, 64)",
    "token=None, auth=False",
    "token_type_ids=[0, 0, 1]",
    "key_padding_mask=None",
    "max_new_tokens=20, num_keys=3",
    "tokens/s: 12345",
    "tokens_per_second=123.4",
    "loss=0.5 key_dim=64 head=8",
    "lr=1e-3, betas=(0.9, 0.95), eps=1e-8",
    "{'lr': 0.1, 'key': 'loss'}",
    "bf16 and fp16+fp32",
    "email me@host.org",
    "optimizer0 group 1",
    "The training raised ValueError: batch 3 is empty",
    "password required",
    "scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)",
    "layers.3.mlp -> layers.4.attn at step 512 (rank 0)",
    "basic fp16",
    "basic bf16",
    "Basic bfloat16",
    "size mismatch for class_token: copying a param with shape torch.Size([1, 1, 8])",
    "size mismatch for memory_token: copying a param with shape torch.Size([1, 1, 8])",
    "blocks.0.conv_pw: 4,096 of 8,192 elements are NaN",
    "conv_pw: input 0 holds NaN",
    "dist_token: 1.5e-8, secret: 4,096 of 8,192",
    "checkpoint_key=teacher",
    "hf_model/gpt2",
    "sk-learn",
    "the --password option must be given, --api-key is required",
    "password=%(password)s, token={token}, password=${PASSWORD}",
    "('query', 'key'), ['token', 'hidden']",
    "argument --token: invalid choice: 'x'",
    "token_id=50256, eos_token_id=50256, token_id: 50256",
    "token_id=255999, boi_token_id=255999, eot_token_id: 128009",
    "eot_token_id=[128001, 128009], boi_token_id='255999'",
    "train.py --boi_token_id 255999",
    "['--boi_token_id', '255999']",
    "argument --boi_token_id: invalid choice: '255999'",
    "shared_key: layer.weight",
    "session_key: word, master_key: weight",
    "storage_key: decoder, access_key: missing",
]


@pytest.mark.parametrize("text", HARMLESS)
def test_harmless_texts_stay(text: str) -> None:
    assert masks.masked_text(text) == text


# --- what is hidden


def test_values_of_the_environment_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", X)
    monkeypatch.setenv("DATABASE_URL", "postgres://u:Pg5TAIL@h/d")
    monkeypatch.setenv("USE_AUTH", "1")
    monkeypatch.setenv("AUTH_REQUIRED", "yes")
    monkeypatch.setenv("SOME_KEY", "true")
    monkeypatch.setenv("PWD", "/home/me")
    masks.hide_environment()
    text = "1 true yes at /home/me"
    assert masks.masked_text(text) == text
    assert masks.masked_text(f"got {X}x, 'Pg5TAIL'") == "got ***x, '***'"


@pytest.mark.parametrize("name", ["DB_PASSWORD", "MODAL_TOKEN_ID", "F_COOKIES"])
def test_a_value_is_hidden_however_it_is_spelled(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = '{"user": "zqtail&/é"}'
    monkeypatch.setenv(name, value)
    masks.hide_environment()
    for form in (value, json.dumps(value), repr(value), quote(value), quote_plus(value)):
        assert "tail" not in masks.masked_text(f"got {form} from it")


def test_arguments_of_a_watched_script_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--token", "swordfishes", "--lr", "1"])
    masks.hide_environment()
    assert masks.masked_text("swordfishes refused, --lr 1") == "*** refused, --lr 1"


def test_a_variable_that_is_set_later_is_hidden_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    masks.hide_environment()
    assert masks.masked_text(f"a {X}") == f"a {X}"
    monkeypatch.setenv("HF_TOKEN", X)
    masks.hide_environment()
    assert masks.masked_text(f"a {X}") == "a ***"


@pytest.mark.parametrize(
    "argument",
    [f"--password=abc,{X}", f"--opts=token=abc,secret={X},lr=1", f"https://me:p@{X}@host",
     f"https://me:p/{X}@host", f"--password='{X}'", f"Authorization: Bearer {X}",
     f'{{"token": "{X}"}}'],
)  # fmt: skip
def test_a_part_of_a_secret_is_hidden_too(argument: str) -> None:
    masks.hide_secrets_of((argument, "--lr", "1"))
    assert masks.masked_text(f"refused: {X} is old") == "refused: *** is old"


def test_the_texts_of_a_watched_step_are_masked_once(tmp_path: Path) -> None:
    import torch

    import ampscope

    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    watch = ampscope.watch(model, optimizer, store=tmp_path / "runs.db", every=1)
    misses = []
    for _ in range(100):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        misses.append(masks.masked_text.cache_info().misses)
    watch.close()
    assert misses[-1] - misses[9] < 20  # of 90 steps: what the first flushes bring


def test_a_secret_that_was_cut_is_hidden_too() -> None:
    masks.hide_secrets_of(("--token", "abcdefgh" * 4))
    long = "x" * 300 + " "
    assert masks.masked_text(long + "abcdefghabcd") == long + "***"


@pytest.mark.parametrize(
    "part",
    ["n", "A", "a.", "é", "a ", "a=", "a://", "token=", "/a", "bearer ", "-", ".", "a='", 'token="',
     "--token ", "a:a@", "://a:", "?a=", "-----BEGIN PRIVATE KEY-----", "wandb ", "cookie:",
     "\\'", "a-", "key: a| ", "password=['a',", "'--token', ", "password='a\\",
     "argument --x: invalid b: ", "https://a@b,"],
)  # fmt: skip
def test_long_texts_are_masked_in_a_moment(part: str) -> None:
    started = time.process_time()
    long = part * 20_000
    masks.masked_text(long)
    masks.masked((long,))
    for source in (long, f"x = 1\n{long}\n(", f"password = {long}"):
        masks.masked_source(source)
    for parsed in (True, False):
        privacy.recorded_traceback(f'  File "a.py", line 1\n    {long}\n{long}', parsed=parsed)
    assert time.process_time() - started < 5.0


@pytest.mark.parametrize(
    "text",
    ["password='" + "\\" * 12_000, "password=['" + "\\" * 12_000, "password=['a'," * 850,
     "password=[\"a'" * 850, "password=\\'" * 1_000, "password=['a" + "(" * 12_000,
     "password='a\\'b" * 900, "token: '" + "token: \\'" * 1_000,
     "passwords=['a', " + "\\\\'" * 4_000,
     "--password, '" + "\\" * 12_000, "['password', '" + "\\" * 12_000],
    ids=range(11),
)  # fmt: skip
def test_quotes_and_backslashes_take_no_time(text: str) -> None:
    started = time.process_time()
    masks.masked_text(text)
    assert time.process_time() - started < 0.5


def test_plain_words_of_weak_names_are_hidden_nowhere_else() -> None:
    masks.hide_secrets_of(
        ["--checkpoint_key", "teacher", "--csv-img-key=filepath", "--auth", "bilinear",
         "--my_token", "False", "--token_mixer", "attention", '{"image_key": "pooling"}']
    )  # fmt: skip
    text = "teacher.backbone of filepath, bilinear False attention pooling"
    assert masks.masked_text(text) == text


def test_files_that_exist_are_hidden_nowhere(tmp_path: Path) -> None:
    file = tmp_path / "abc12345" / "creds.json"
    file.parent.mkdir()
    file.write_text("{}")
    masks.hide_secrets_of(("--credentials", str(file), "--password=/scratch/qw12345/creds.json"))
    text = f"{file} of /data/abc12345/x and /data/qw12345/x"
    assert masks.masked_text(text) == text


def test_a_variable_that_is_deleted_meanwhile_ends_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Changing:
        def keys(self) -> list[str]:
            return ["DELETED"]

        def __getitem__(self, name: str) -> str:
            raise KeyError(name)

    with monkeypatch.context() as patched:
        patched.setattr("os.environ", Changing())
        masks.hide_environment()


HOSTILE = {
    "many terms": "password = " + "+".join(["'a'"] * 1_500),
    "deep": "password = " + "(" * 500 + "'a'" + ")" * 500,
    "calls": "password = " + "f(" * 150 + "'a'" + ")" * 150,
    "attributes": "password = 'a'" + ".b()" * 2_000,
    "line end": '{"password": "a\rb", "x": """c\rd"""}',
    "line end behind": "{'a': 'b',\r\r\r'token': 'd'}",
    "form feed": "password = 'a'\x0c\nb = 'c'\x0c",
    "no text": "password = '\x00'",
    "no user": "--password=~\x00a",
    "half": "password = '\udcff' + 'a'",
}


def test_what_begins_as_a_switch_is_none() -> None:
    assert masks.masked(("--password=true        TAIL",)) == ("--password=***",)


def test_an_object_with_another_line_end_is_masked_as_a_whole() -> None:
    found = masks.masked((f"{{'a': 1,\r'password': '{X}'}}",))
    assert found == ("{'a': 1,\r'password': ***",)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_no_text_makes_masking_raise(text: str) -> None:
    for form in (text, text + "\n", f"x = 1\n{text}\n", f"(\n{text}"):
        assert masks.masked_source(form).count("\n") == form.count("\n")
        masks.masked_text(form)
        masks.masked((form, f"--x={form}"))
        masks.hide_secrets_of((form,))
