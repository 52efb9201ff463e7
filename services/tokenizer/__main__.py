"""`python -m services.tokenizer`: one tokenizer process."""

from kvmesh.host.process import main
from kvmesh.types import Role
from services.tokenizer.app import app
from services.tokenizer.config import TokenizerConfig

if __name__ == "__main__":
    raise SystemExit(main(Role.TOKENIZER, TokenizerConfig, app))
