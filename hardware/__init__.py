"""Devices, kernels, quantisation. Only this room calls torch.cuda, torch.npu, torch_npu and MindSpeed."""
