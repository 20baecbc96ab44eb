"""Entry of `python -m trt_redknot`."""

from trt_redknot.cli.main import main

if __name__ == "__main__":
    main()
