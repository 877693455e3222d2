"""A plugin of pytest that gives its process the fake NPU: PYTEST_PLUGINS=with_fake_npu."""

import fake_npu

fake_npu.install()
