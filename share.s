	.file	"<string>"
	.section	.rodata.cst4,"aM",@progbits,4
	.p2align	2, 0x0
.LCPI0_0:
	.long	0x3c23d70a
	.section	.ltext,"axl",@progbits
	.globl	_ZN8__main__5shareB2v5B64c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAFkEM0AQAE5ArrayIfLi2E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx
	.p2align	4
	.type	_ZN8__main__5shareB2v5B64c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAFkEM0AQAE5ArrayIfLi2E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx,@function
_ZN8__main__5shareB2v5B64c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAFkEM0AQAE5ArrayIfLi2E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx:
	.cfi_startproc
	pushq	%rbp
	.cfi_def_cfa_offset 16
	pushq	%r15
	.cfi_def_cfa_offset 24
	pushq	%r14
	.cfi_def_cfa_offset 32
	pushq	%r13
	.cfi_def_cfa_offset 40
	pushq	%r12
	.cfi_def_cfa_offset 48
	pushq	%rbx
	.cfi_def_cfa_offset 56
	subq	$104, %rsp
	.cfi_def_cfa_offset 160
	.cfi_offset %rbx, -56
	.cfi_offset %r12, -48
	.cfi_offset %r13, -40
	.cfi_offset %r14, -32
	.cfi_offset %r15, -24
	.cfi_offset %rbp, -16
	movq	384(%rsp), %r13
	movq	256(%rsp), %r15
	movq	200(%rsp), %r12
	movabsq	$NRT_incref, %rbx
	movq	%rdi, 24(%rsp)
	movq	%rdx, %rdi
	movq	%r9, 72(%rsp)
	movq	%rcx, %rbp
	movq	%rdx, %r14
	movq	%rsi, 16(%rsp)
	callq	*%rbx
	movq	%r12, %rdi
	callq	*%rbx
	movq	%r15, %rdi
	callq	*%rbx
	movq	312(%rsp), %rdi
	callq	*%rbx
	testq	%r13, %r13
	jle	.LBB0_7
	movabsq	$.LCPI0_0, %rax
	movq	360(%rsp), %rcx
	movq	344(%rsp), %rdx
	movq	160(%rsp), %rsi
	leaq	96(%rsp), %r12
	leaq	88(%rsp), %r15
	movq	%r14, 48(%rsp)
	vmovss	(%rax), %xmm0
	movq	176(%rsp), %rax
	leaq	(%rdx,%rcx,4), %rcx
	leaq	(%rsi,%rax,4), %rax
	movq	%rcx, 56(%rsp)
	movq	%rax, 64(%rsp)
	vmovss	%xmm0, 12(%rsp)
.LBB0_2:
	leaq	-1(%r13), %rax
	movq	$-8, %rbx
	movq	%r13, 40(%rsp)
	movq	%rax, 32(%rsp)
	.p2align	4
.LBB0_3:
	movq	%rbx, 80(%rsp)
	movabsq	$NRT_incref, %rbx
	movq	%r14, %rdi
	callq	*%rbx
	movq	312(%rsp), %r13
	movq	%r13, %rdi
	callq	*%rbx
	vmovss	12(%rsp), %xmm0
	movq	%r14, %rdx
	movq	72(%rsp), %rbx
	movq	376(%rsp), %r14
	movq	176(%rsp), %r8
	movq	%r12, %rdi
	movq	%r15, %rsi
	movq	%rbp, %rcx
	movq	%rbx, %r9
	pushq	%r14
	.cfi_adjust_cfa_offset 8
	movq	368(%rsp), %r14
	pushq	%r14
	.cfi_adjust_cfa_offset 8
	pushq	360(%rsp)
	.cfi_adjust_cfa_offset 8
	movq	360(%rsp), %rax
	pushq	%rax
	.cfi_adjust_cfa_offset 8
	pushq	%r14
	.cfi_adjust_cfa_offset 8
	movq	360(%rsp), %rax
	pushq	%rax
	.cfi_adjust_cfa_offset 8
	pushq	%r13
	.cfi_adjust_cfa_offset 8
	pushq	$0
	.cfi_adjust_cfa_offset 8
	movq	368(%rsp), %rax
	pushq	%rax
	.cfi_adjust_cfa_offset 8
	movq	368(%rsp), %rax
	pushq	%rax
	.cfi_adjust_cfa_offset 8
	movq	368(%rsp), %rax
	pushq	%rax
	.cfi_adjust_cfa_offset 8
	movq	368(%rsp), %rax
	pushq	%rax
	.cfi_adjust_cfa_offset 8
	movq	368(%rsp), %rax
	pushq	%rax
	.cfi_adjust_cfa_offset 8
	movq	368(%rsp), %rax
	pushq	%rax
	.cfi_adjust_cfa_offset 8
	movq	368(%rsp), %r13
	pushq	%r13
	.cfi_adjust_cfa_offset 8
	movq	368(%rsp), %rax
	pushq	%rax
	.cfi_adjust_cfa_offset 8
	movq	368(%rsp), %rax
	pushq	%rax
	.cfi_adjust_cfa_offset 8
	movq	368(%rsp), %rax
	pushq	%rax
	.cfi_adjust_cfa_offset 8
	movq	368(%rsp), %rax
	pushq	%rax
	.cfi_adjust_cfa_offset 8
	movq	368(%rsp), %rax
	pushq	%rax
	.cfi_adjust_cfa_offset 8
	movq	368(%rsp), %rax
	pushq	%rax
	.cfi_adjust_cfa_offset 8
	pushq	368(%rsp)
	.cfi_adjust_cfa_offset 8
	pushq	$32
	.cfi_adjust_cfa_offset 8
	movq	376(%rsp), %rax
	pushq	%rax
	.cfi_adjust_cfa_offset 8
	movq	%r8, %r13
	pushq	%r8
	.cfi_adjust_cfa_offset 8
	pushq	360(%rsp)
	.cfi_adjust_cfa_offset 8
	movabsq	$_ZN9pdcluster6engine9wide_rows12share_scoresB2v6B78c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughmJlMbAIpoAE5ArrayIfLi1E1C7mutable7alignedE24Literal_5bint_5d_2832_29f5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedEx5ArrayIfLi1E1C7mutable7alignedE, %rax
	callq	*%rax
	addq	$208, %rsp
	.cfi_adjust_cfa_offset -208
	testl	%eax, %eax
	jne	.LBB0_9
	vmovss	12(%rsp), %xmm0
	movq	%r15, %rsi
	movq	48(%rsp), %r15
	movq	200(%rsp), %rax
	movq	%r12, %rdi
	movq	%rbp, %r12
	movq	%rbp, %rcx
	movq	%r13, %r8
	movq	%rbx, %r9
	movq	%r15, %rdx
	pushq	376(%rsp)
	.cfi_adjust_cfa_offset 8
	pushq	%r14
	.cfi_adjust_cfa_offset 8
	pushq	72(%rsp)
	.cfi_adjust_cfa_offset 8
	pushq	360(%rsp)
	.cfi_adjust_cfa_offset 8
	pushq	%r14
	.cfi_adjust_cfa_offset 8
	pushq	360(%rsp)
	.cfi_adjust_cfa_offset 8
	pushq	360(%rsp)
	.cfi_adjust_cfa_offset 8
	pushq	$1
	.cfi_adjust_cfa_offset 8
	pushq	368(%rsp)
	.cfi_adjust_cfa_offset 8
	pushq	368(%rsp)
	.cfi_adjust_cfa_offset 8
	pushq	368(%rsp)
	.cfi_adjust_cfa_offset 8
	pushq	368(%rsp)
	.cfi_adjust_cfa_offset 8
	pushq	368(%rsp)
	.cfi_adjust_cfa_offset 8
	pushq	368(%rsp)
	.cfi_adjust_cfa_offset 8
	pushq	368(%rsp)
	.cfi_adjust_cfa_offset 8
	pushq	368(%rsp)
	.cfi_adjust_cfa_offset 8
	pushq	368(%rsp)
	.cfi_adjust_cfa_offset 8
	pushq	368(%rsp)
	.cfi_adjust_cfa_offset 8
	pushq	368(%rsp)
	.cfi_adjust_cfa_offset 8
	pushq	368(%rsp)
	.cfi_adjust_cfa_offset 8
	pushq	368(%rsp)
	.cfi_adjust_cfa_offset 8
	pushq	%rax
	.cfi_adjust_cfa_offset 8
	pushq	$32
	.cfi_adjust_cfa_offset 8
	pushq	376(%rsp)
	.cfi_adjust_cfa_offset 8
	pushq	%r13
	.cfi_adjust_cfa_offset 8
	pushq	264(%rsp)
	.cfi_adjust_cfa_offset 8
	movabsq	$_ZN9pdcluster6engine9wide_rows12share_scoresB2v6B78c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughmJlMbAIpoAE5ArrayIfLi1E1C7mutable7alignedE24Literal_5bint_5d_2832_29f5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedEx5ArrayIfLi1E1C7mutable7alignedE, %rax
	callq	*%rax
	addq	$208, %rsp
	.cfi_adjust_cfa_offset -208
	movq	80(%rsp), %rbx
	testl	%eax, %eax
	jne	.LBB0_9
	movq	312(%rsp), %rdi
	movabsq	$NRT_decref, %r13
	callq	*%r13
	movq	%r15, %rdi
	callq	*%r13
	movq	%r12, %rbp
	movq	%r15, %r14
	incq	%rbx
	leaq	96(%rsp), %r12
	leaq	88(%rsp), %r15
	jne	.LBB0_3
	cmpq	$1, 40(%rsp)
	movq	32(%rsp), %r13
	jg	.LBB0_2
.LBB0_7:
	movq	256(%rsp), %rdi
	movabsq	$NRT_decref, %rbx
	callq	*%rbx
	movq	200(%rsp), %rdi
	callq	*%rbx
	movq	312(%rsp), %rdi
	callq	*%rbx
	movq	%r14, %rdi
	callq	*%rbx
	movq	24(%rsp), %rcx
	xorl	%eax, %eax
	jmp	.LBB0_10
.LBB0_9:
	movq	16(%rsp), %rcx
.LBB0_10:
	movq	$0, (%rcx)
	addq	$104, %rsp
	.cfi_def_cfa_offset 56
	popq	%rbx
	.cfi_def_cfa_offset 48
	popq	%r12
	.cfi_def_cfa_offset 40
	popq	%r13
	.cfi_def_cfa_offset 32
	popq	%r14
	.cfi_def_cfa_offset 24
	popq	%r15
	.cfi_def_cfa_offset 16
	popq	%rbp
	.cfi_def_cfa_offset 8
	retq
.Lfunc_end0:
	.size	_ZN8__main__5shareB2v5B64c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAFkEM0AQAE5ArrayIfLi2E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx, .Lfunc_end0-_ZN8__main__5shareB2v5B64c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAFkEM0AQAE5ArrayIfLi2E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx
	.cfi_endproc

	.globl	_ZN7cpython8__main__5shareB2v5B64c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAFkEM0AQAE5ArrayIfLi2E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx
	.p2align	4
	.type	_ZN7cpython8__main__5shareB2v5B64c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAFkEM0AQAE5ArrayIfLi2E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx,@function
_ZN7cpython8__main__5shareB2v5B64c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAFkEM0AQAE5ArrayIfLi2E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx:
	.cfi_startproc
	pushq	%rbp
	.cfi_def_cfa_offset 16
	pushq	%r15
	.cfi_def_cfa_offset 24
	pushq	%r14
	.cfi_def_cfa_offset 32
	pushq	%r13
	.cfi_def_cfa_offset 40
	pushq	%r12
	.cfi_def_cfa_offset 48
	pushq	%rbx
	.cfi_def_cfa_offset 56
	subq	$728, %rsp
	.cfi_def_cfa_offset 784
	.cfi_offset %rbx, -56
	.cfi_offset %r12, -48
	.cfi_offset %r13, -40
	.cfi_offset %r14, -32
	.cfi_offset %r15, -24
	.cfi_offset %rbp, -16
	leaq	392(%rsp), %rax
	movq	%rsi, %rdi
	movabsq	$.const.share, %rsi
	movabsq	$PyArg_UnpackTuple, %r10
	leaq	424(%rsp), %r8
	leaq	416(%rsp), %r9
	movl	$5, %edx
	movl	$5, %ecx
	xorl	%ebx, %ebx
	movq	%rax, 16(%rsp)
	leaq	400(%rsp), %rax
	movq	%rax, 8(%rsp)
	leaq	408(%rsp), %rax
	movq	%rax, (%rsp)
	xorl	%eax, %eax
	callq	*%r10
	movq	$0, 280(%rsp)
	testl	%eax, %eax
	je	.LBB1_14
	movabsq	$_ZN08NumbaEnv8__main__5shareB2v5B64c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAFkEM0AQAE5ArrayIfLi2E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx, %rax
	cmpq	$0, (%rax)
	je	.LBB1_19
	movq	424(%rsp), %rdi
	movabsq	$NRT_adapt_ndarray_from_python, %r15
	leaq	640(%rsp), %rsi
	vxorps	%xmm0, %xmm0, %xmm0
	vmovups	%ymm0, 640(%rsp)
	vmovups	%ymm0, 672(%rsp)
	movq	$0, 704(%rsp)
	vzeroupper
	callq	*%r15
	cmpq	$4, 664(%rsp)
	setne	%cl
	testl	%eax, %eax
	setne	%bl
	orb	%cl, %bl
	cmpb	$1, %bl
	je	.LBB1_21
	testb	%bl, %bl
	jne	.LBB1_22
.LBB1_4:
	movq	416(%rsp), %rdi
	movq	640(%rsp), %r14
	movq	648(%rsp), %r13
	movq	672(%rsp), %rbp
	movq	688(%rsp), %rbx
	movq	704(%rsp), %r12
	leaq	496(%rsp), %rsi
	vxorps	%xmm0, %xmm0, %xmm0
	vmovups	%ymm0, 496(%rsp)
	vmovups	%ymm0, 520(%rsp)
	vzeroupper
	callq	*%r15
	testl	%eax, %eax
	jne	.LBB1_23
	cmpq	$4, 520(%rsp)
	jne	.LBB1_23
	movq	504(%rsp), %rax
	movq	512(%rsp), %rcx
	movq	528(%rsp), %rdx
	movq	408(%rsp), %rdi
	movq	%r12, 240(%rsp)
	movq	496(%rsp), %r12
	leaq	432(%rsp), %rsi
	vxorps	%xmm0, %xmm0, %xmm0
	vmovups	%ymm0, 432(%rsp)
	vmovups	%ymm0, 456(%rsp)
	movq	%rax, 384(%rsp)
	movq	%rcx, 376(%rsp)
	movq	536(%rsp), %rcx
	movq	544(%rsp), %rax
	movq	%rdx, 368(%rsp)
	movq	%rcx, 360(%rsp)
	movq	%rax, 352(%rsp)
	vzeroupper
	callq	*%r15
	testl	%eax, %eax
	jne	.LBB1_24
	cmpq	$4, 456(%rsp)
	jne	.LBB1_24
	movq	432(%rsp), %rax
	movq	440(%rsp), %rdx
	movq	448(%rsp), %rcx
	movq	400(%rsp), %rdi
	leaq	560(%rsp), %rsi
	vxorps	%xmm0, %xmm0, %xmm0
	movq	%rbx, 344(%rsp)
	vmovups	%ymm0, 560(%rsp)
	vmovups	%ymm0, 592(%rsp)
	movq	$0, 624(%rsp)
	movq	%rax, 272(%rsp)
	movq	%rdx, 336(%rsp)
	movq	%rcx, 328(%rsp)
	movq	464(%rsp), %rdx
	movq	472(%rsp), %rcx
	movq	480(%rsp), %rax
	movq	%rdx, 320(%rsp)
	movq	%rcx, 312(%rsp)
	movq	%rax, 304(%rsp)
	vzeroupper
	callq	*%r15
	cmpq	$4, 584(%rsp)
	setne	%cl
	testl	%eax, %eax
	setne	%bl
	orb	%cl, %bl
	jne	.LBB1_25
	testb	%bl, %bl
	jne	.LBB1_28
.LBB1_10:
	movq	560(%rsp), %rax
	movq	392(%rsp), %rdi
	movq	%r13, 296(%rsp)
	movq	%r12, 256(%rsp)
	movq	%r14, 264(%rsp)
	movq	568(%rsp), %r14
	movq	592(%rsp), %r12
	movq	608(%rsp), %rbx
	movq	624(%rsp), %r13
	movq	%rbp, 288(%rsp)
	movq	%rax, 248(%rsp)
	movabsq	$PyNumber_Long, %rax
	callq	*%rax
	testq	%rax, %rax
	je	.LBB1_26
	movq	%rax, %r15
	movabsq	$PyLong_AsLongLong, %rax
	movq	%r15, %rdi
	callq	*%rax
	movq	%rax, %rbp
	movabsq	$Py_DecRef, %rax
	movq	%r15, %rdi
	callq	*%rax
	movabsq	$PyErr_Occurred, %rax
	callq	*%rax
	testq	%rax, %rax
	jne	.LBB1_27
.LBB1_12:
	movq	320(%rsp), %rcx
	movq	312(%rsp), %rdx
	movq	304(%rsp), %rax
	movq	%r13, 216(%rsp)
	movq	%r12, 184(%rsp)
	movq	%r14, 160(%rsp)
	movq	248(%rsp), %r15
	movq	272(%rsp), %r13
	movq	256(%rsp), %r12
	movq	264(%rsp), %r14
	leaq	720(%rsp), %rdi
	leaq	280(%rsp), %rsi
	movl	$4, %r9d
	movq	%rbp, 224(%rsp)
	movq	%rbx, 200(%rsp)
	movq	$4, 176(%rsp)
	movq	$4, 120(%rsp)
	movq	$4, 64(%rsp)
	movq	%rcx, 128(%rsp)
	movq	336(%rsp), %rcx
	movq	%rdx, 136(%rsp)
	movq	328(%rsp), %rdx
	movq	%rax, 144(%rsp)
	movabsq	$_ZN8__main__5shareB2v5B64c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAFkEM0AQAE5ArrayIfLi2E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx, %rax
	movq	%r15, 152(%rsp)
	movq	%r13, 96(%rsp)
	movq	%r12, 40(%rsp)
	movq	%rcx, 104(%rsp)
	movq	360(%rsp), %rcx
	movq	%rdx, 112(%rsp)
	movq	352(%rsp), %rdx
	movq	%rcx, 80(%rsp)
	movq	376(%rsp), %rcx
	movq	%rdx, 88(%rsp)
	movq	368(%rsp), %rdx
	movq	%rcx, 56(%rsp)
	movq	240(%rsp), %rcx
	movq	%rdx, 72(%rsp)
	movq	384(%rsp), %rdx
	movq	%rcx, 32(%rsp)
	movq	288(%rsp), %rcx
	movq	%rdx, 48(%rsp)
	movq	344(%rsp), %rdx
	movq	%rcx, (%rsp)
	movq	296(%rsp), %rcx
	movq	%rdx, 16(%rsp)
	movq	%r14, %rdx
	callq	*%rax
	movq	280(%rsp), %rcx
	movabsq	$NRT_decref, %rbx
	movq	%r14, %rdi
	movl	%eax, %ebp
	movq	%rcx, 240(%rsp)
	callq	*%rbx
	movq	%r12, %rdi
	callq	*%rbx
	movq	%r13, %rdi
	callq	*%rbx
	movq	%r15, %rdi
	callq	*%rbx
	testl	%ebp, %ebp
	jne	.LBB1_15
	movabsq	$_Py_NoneStruct, %rbx
	movabsq	$Py_IncRef, %rax
	movq	%rbx, %rdi
	callq	*%rax
.LBB1_14:
	movq	%rbx, %rax
	addq	$728, %rsp
	.cfi_def_cfa_offset 56
	popq	%rbx
	.cfi_def_cfa_offset 48
	popq	%r12
	.cfi_def_cfa_offset 40
	popq	%r13
	.cfi_def_cfa_offset 32
	popq	%r14
	.cfi_def_cfa_offset 24
	popq	%r15
	.cfi_def_cfa_offset 16
	popq	%rbp
	.cfi_def_cfa_offset 8
	retq
.LBB1_15:
	.cfi_def_cfa_offset 784
	movq	240(%rsp), %r14
	jle	.LBB1_31
	movabsq	$PyErr_Clear, %rax
	callq	*%rax
	movl	8(%r14), %esi
	movq	(%r14), %rdi
	cmpl	$0, 32(%r14)
	jle	.LBB1_34
	movslq	%esi, %rsi
	movabsq	$PyBytes_FromStringAndSize, %rax
	callq	*%rax
	movq	16(%r14), %rdi
	movq	%rax, %rbx
	callq	*24(%r14)
	testq	%rax, %rax
	je	.LBB1_41
	movabsq	$numba_runtime_build_excinfo_struct, %rcx
	movq	%rbx, %rdi
	movq	%rax, %rsi
	callq	*%rcx
	movabsq	$NRT_Free, %r15
	movq	%r14, %rdi
	movq	%rax, %rbx
	callq	*%r15
	jmp	.LBB1_35
.LBB1_19:
	movabsq	$PyExc_RuntimeError, %rdi
	movabsq	$".const.missing Environment: _ZN08NumbaEnv8__main__5shareB2v5B64c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAFkEM0AQAE5ArrayIfLi2E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx", %rsi
.LBB1_20:
	movabsq	$PyErr_SetString, %rax
	callq	*%rax
	xorl	%ebx, %ebx
	jmp	.LBB1_14
.LBB1_21:
	movabsq	$PyExc_TypeError, %rdi
	movabsq	$".const.can't unbox array from PyObject into native value.  The object maybe of a different type", %rsi
	movabsq	$PyErr_SetString, %rax
	callq	*%rax
	testb	%bl, %bl
	je	.LBB1_4
	jmp	.LBB1_22
.LBB1_23:
	movabsq	$PyExc_TypeError, %rdi
	movabsq	$".const.can't unbox array from PyObject into native value.  The object maybe of a different type", %rsi
	movabsq	$PyErr_SetString, %rax
	callq	*%rax
	jmp	.LBB1_30
.LBB1_24:
	movabsq	$PyExc_TypeError, %rdi
	movabsq	$".const.can't unbox array from PyObject into native value.  The object maybe of a different type", %rsi
	movabsq	$PyErr_SetString, %rax
	callq	*%rax
	jmp	.LBB1_29
.LBB1_25:
	movabsq	$PyExc_TypeError, %rdi
	movabsq	$".const.can't unbox array from PyObject into native value.  The object maybe of a different type", %rsi
	movabsq	$PyErr_SetString, %rax
	callq	*%rax
	testb	%bl, %bl
	je	.LBB1_10
	jmp	.LBB1_28
.LBB1_26:
	xorl	%ebp, %ebp
	movabsq	$PyErr_Occurred, %rax
	callq	*%rax
	testq	%rax, %rax
	je	.LBB1_12
.LBB1_27:
	movq	248(%rsp), %rdi
	movabsq	$NRT_decref, %rax
	callq	*%rax
	movq	264(%rsp), %r14
	movq	256(%rsp), %r12
.LBB1_28:
	movq	272(%rsp), %rdi
	movabsq	$NRT_decref, %rax
	callq	*%rax
.LBB1_29:
	movabsq	$NRT_decref, %rax
	movq	%r12, %rdi
	callq	*%rax
.LBB1_30:
	movabsq	$NRT_decref, %rax
	movq	%r14, %rdi
	jmp	.LBB1_37
.LBB1_31:
	cmpl	$-3, %ebp
	je	.LBB1_38
	cmpl	$-1, %ebp
	jne	.LBB1_39
.LBB1_22:
	xorl	%ebx, %ebx
	jmp	.LBB1_14
.LBB1_34:
	movq	16(%r14), %rdx
	movabsq	$numba_unpickle, %rax
	callq	*%rax
	movq	%rax, %rbx
.LBB1_35:
	testq	%rbx, %rbx
	je	.LBB1_22
	movabsq	$numba_do_raise, %rax
	movq	%rbx, %rdi
.LBB1_37:
	callq	*%rax
	xorl	%ebx, %ebx
	jmp	.LBB1_14
.LBB1_38:
	movabsq	$PyExc_StopIteration, %rdi
	movabsq	$PyErr_SetNone, %rax
	jmp	.LBB1_37
.LBB1_39:
	movabsq	$PyExc_SystemError, %rdi
	movabsq	$".const.unknown error when calling native function", %rsi
	jmp	.LBB1_20
.LBB1_41:
	movabsq	$PyExc_RuntimeError, %rdi
	movabsq	$".const.Error creating Python tuple from runtime exception arguments", %rsi
	jmp	.LBB1_20
.Lfunc_end1:
	.size	_ZN7cpython8__main__5shareB2v5B64c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAFkEM0AQAE5ArrayIfLi2E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx, .Lfunc_end1-_ZN7cpython8__main__5shareB2v5B64c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAFkEM0AQAE5ArrayIfLi2E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx
	.cfi_endproc

	.globl	cfunc._ZN8__main__5shareB2v5B64c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAFkEM0AQAE5ArrayIfLi2E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx
	.p2align	4
	.type	cfunc._ZN8__main__5shareB2v5B64c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAFkEM0AQAE5ArrayIfLi2E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx,@function
cfunc._ZN8__main__5shareB2v5B64c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAFkEM0AQAE5ArrayIfLi2E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx:
	.cfi_startproc
	pushq	%rbp
	.cfi_def_cfa_offset 16
	pushq	%r15
	.cfi_def_cfa_offset 24
	pushq	%r14
	.cfi_def_cfa_offset 32
	pushq	%rbx
	.cfi_def_cfa_offset 40
	subq	$264, %rsp
	.cfi_def_cfa_offset 304
	.cfi_offset %rbx, -40
	.cfi_offset %r14, -32
	.cfi_offset %r15, -24
	.cfi_offset %rbp, -16
	vmovups	328(%rsp), %ymm0
	vmovups	360(%rsp), %xmm1
	vmovups	384(%rsp), %ymm2
	vmovaps	416(%rsp), %xmm3
	vmovups	440(%rsp), %xmm4
	vmovaps	464(%rsp), %xmm5
	vmovups	504(%rsp), %xmm6
	movq	%rcx, %r9
	movq	%rsi, %rcx
	movq	%rdi, %rdx
	movq	304(%rsp), %rax
	movq	320(%rsp), %rsi
	movq	376(%rsp), %rdi
	movq	432(%rsp), %r10
	movq	488(%rsp), %r11
	movq	$0, 256(%rsp)
	movq	$0, 248(%rsp)
	vmovups	%xmm6, 216(%rsp)
	movq	%r11, 200(%rsp)
	vmovups	%xmm5, 176(%rsp)
	vmovups	%xmm4, 152(%rsp)
	movq	%r10, 144(%rsp)
	vmovups	%xmm3, 128(%rsp)
	vmovups	%ymm2, 96(%rsp)
	movq	%rdi, 88(%rsp)
	vmovups	%xmm1, 72(%rsp)
	vmovups	%ymm0, 40(%rsp)
	movq	%rsi, 32(%rsp)
	movq	%rax, 16(%rsp)
	movabsq	$_ZN8__main__5shareB2v5B64c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAFkEM0AQAE5ArrayIfLi2E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx, %rax
	leaq	256(%rsp), %rdi
	leaq	248(%rsp), %rsi
	movq	%r8, (%rsp)
	vzeroupper
	callq	*%rax
	movl	%eax, %ecx
	movq	248(%rsp), %rbx
	movq	256(%rsp), %rax
	movl	$0, 244(%rsp)
	testl	%ecx, %ecx
	jne	.LBB2_1
.LBB2_8:
	addq	$264, %rsp
	.cfi_def_cfa_offset 40
	popq	%rbx
	.cfi_def_cfa_offset 32
	popq	%r14
	.cfi_def_cfa_offset 24
	popq	%r15
	.cfi_def_cfa_offset 16
	popq	%rbp
	.cfi_def_cfa_offset 8
	retq
.LBB2_1:
	.cfi_def_cfa_offset 304
	movabsq	$numba_gil_ensure, %r14
	leaq	244(%rsp), %rdi
	movq	%rax, %r15
	movl	%ecx, %ebp
	callq	*%r14
	testl	%ebp, %ebp
	jle	.LBB2_9
	movabsq	$PyErr_Clear, %rax
	callq	*%rax
	movl	8(%rbx), %esi
	movq	(%rbx), %rdi
	cmpl	$0, 32(%rbx)
	jle	.LBB2_12
	movslq	%esi, %rsi
	movabsq	$PyBytes_FromStringAndSize, %rax
	callq	*%rax
	movq	16(%rbx), %rdi
	movq	%rax, %r14
	callq	*24(%rbx)
	testq	%rax, %rax
	je	.LBB2_4
	movabsq	$numba_runtime_build_excinfo_struct, %rcx
	movq	%r14, %rdi
	movq	%rax, %rsi
	callq	*%rcx
	movabsq	$NRT_Free, %rbp
	movq	%rbx, %rdi
	movq	%rax, %r14
	callq	*%rbp
	jmp	.LBB2_13
.LBB2_9:
	movl	%ebp, %eax
	cmpl	$-3, %ebp
	je	.LBB2_5
	cmpl	$-1, %eax
	je	.LBB2_7
	movabsq	$PyExc_SystemError, %rdi
	movabsq	$".const.unknown error when calling native function.2", %rsi
	movabsq	$PyErr_SetString, %rax
	callq	*%rax
	jmp	.LBB2_7
.LBB2_12:
	movq	16(%rbx), %rdx
	movabsq	$numba_unpickle, %rax
	callq	*%rax
	movq	%rax, %r14
.LBB2_13:
	testq	%r14, %r14
	je	.LBB2_7
	movabsq	$numba_do_raise, %rax
	movq	%r14, %rdi
.LBB2_6:
	callq	*%rax
.LBB2_7:
	movabsq	$".const.<numba.core.cpu.CPUContext>", %rdi
	movabsq	$PyUnicode_FromString, %rax
	callq	*%rax
	movabsq	$PyErr_WriteUnraisable, %r14
	movq	%rax, %rbx
	movq	%rbx, %rdi
	callq	*%r14
	movabsq	$Py_DecRef, %rax
	movq	%rbx, %rdi
	callq	*%rax
	movabsq	$numba_gil_release, %rax
	leaq	244(%rsp), %rdi
	callq	*%rax
	movq	%r15, %rax
	jmp	.LBB2_8
.LBB2_5:
	movabsq	$PyExc_StopIteration, %rdi
	movabsq	$PyErr_SetNone, %rax
	jmp	.LBB2_6
.LBB2_4:
	movabsq	$PyExc_RuntimeError, %rdi
	movabsq	$".const.Error creating Python tuple from runtime exception arguments.1", %rsi
	movabsq	$PyErr_SetString, %rax
	callq	*%rax
	xorl	%eax, %eax
	jmp	.LBB2_8
.Lfunc_end2:
	.size	cfunc._ZN8__main__5shareB2v5B64c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAFkEM0AQAE5ArrayIfLi2E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx, .Lfunc_end2-cfunc._ZN8__main__5shareB2v5B64c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAFkEM0AQAE5ArrayIfLi2E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx
	.cfi_endproc

	.section	.rodata.cst4,"aM",@progbits,4
	.p2align	2, 0x0
.LCPI3_0:
	.long	0xf149f2ca
.LCPI3_1:
	.long	0x3fb8aa3b
.LCPI3_2:
	.long	0xc2fc0000
.LCPI3_3:
	.long	0x42fc0000
.LCPI3_4:
	.long	0x3f000000
.LCPI3_5:
	.long	0x3f317218
.LCPI3_6:
	.long	0x391035b7
.LCPI3_7:
	.long	0x3ab60b61
.LCPI3_8:
	.long	0x3c088889
.LCPI3_9:
	.long	0x3d2aaaab
.LCPI3_10:
	.long	0x3e2aaaab
.LCPI3_11:
	.long	1065353216
	.section	.ltext,"axl",@progbits
	.weak	_ZN9pdcluster6engine9wide_rows12share_scoresB2v6B78c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughmJlMbAIpoAE5ArrayIfLi1E1C7mutable7alignedE24Literal_5bint_5d_2832_29f5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedEx5ArrayIfLi1E1C7mutable7alignedE
	.p2align	4
	.type	_ZN9pdcluster6engine9wide_rows12share_scoresB2v6B78c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughmJlMbAIpoAE5ArrayIfLi1E1C7mutable7alignedE24Literal_5bint_5d_2832_29f5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedEx5ArrayIfLi1E1C7mutable7alignedE,@function
_ZN9pdcluster6engine9wide_rows12share_scoresB2v6B78c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughmJlMbAIpoAE5ArrayIfLi1E1C7mutable7alignedE24Literal_5bint_5d_2832_29f5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedEx5ArrayIfLi1E1C7mutable7alignedE:
	.cfi_startproc
	pushq	%rbp
	.cfi_def_cfa_offset 16
	pushq	%r15
	.cfi_def_cfa_offset 24
	pushq	%r14
	.cfi_def_cfa_offset 32
	pushq	%r13
	.cfi_def_cfa_offset 40
	pushq	%r12
	.cfi_def_cfa_offset 48
	pushq	%rbx
	.cfi_def_cfa_offset 56
	subq	$184, %rsp
	.cfi_def_cfa_offset 240
	.cfi_offset %rbx, -56
	.cfi_offset %r12, -48
	.cfi_offset %r13, -40
	.cfi_offset %r14, -32
	.cfi_offset %r15, -24
	.cfi_offset %rbp, -16
	movq	%rdi, (%rsp)
	movq	272(%rsp), %rdi
	movq	392(%rsp), %r12
	movq	384(%rsp), %rbp
	movq	328(%rsp), %r15
	movq	240(%rsp), %r14
	movabsq	$NRT_incref, %rbx
	vmovaps	%xmm0, 48(%rsp)
	callq	*%rbx
	movq	%r15, %rdi
	callq	*%rbx
	movq	%r12, %rdi
	callq	*%rbx
	vmovss	(%r14), %xmm0
	movabsq	$.LCPI3_0, %rax
	vmovss	4(%r14), %xmm1
	leaq	(,%rbp,4), %rcx
	addq	304(%rsp), %rcx
	vmovaps	48(%rsp), %xmm2
	movq	%rbp, %r13
	sarq	$63, %r13
	vmovups	(%r14), %ymm3
	vmovups	32(%r14), %ymm4
	vmovups	64(%r14), %ymm5
	movabsq	$.LCPI3_1, %rdx
	movabsq	$.LCPI3_2, %rsi
	movabsq	$.LCPI3_3, %rdi
	movabsq	$.LCPI3_4, %r8
	movabsq	$.LCPI3_5, %r9
	movabsq	$.LCPI3_6, %r10
	movabsq	$.LCPI3_7, %r11
	movabsq	$.LCPI3_8, %r12
	movabsq	$.LCPI3_9, %rbx
	movabsq	$.LCPI3_11, %rbp
	movabsq	$NRT_decref, %r15
	vmaxss	(%rax), %xmm0, %xmm0
	movq	312(%rsp), %rax
	vbroadcastss	(%r9), %ymm12
	vbroadcastss	(%r10), %ymm13
	vbroadcastss	(%r11), %ymm15
	andq	%r13, %rax
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	8(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	12(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	16(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	20(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	24(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	28(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	32(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	36(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	40(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	44(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	48(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	52(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	56(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	60(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	64(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	68(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	72(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	76(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	80(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	84(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	88(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	92(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	96(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	100(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	104(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	108(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	112(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	116(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	120(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	124(%r14), %xmm1
	vmaxss	%xmm0, %xmm1, %xmm0
	vmovss	(%rcx,%rax,4), %xmm1
	vmulss	%xmm2, %xmm0, %xmm0
	vbroadcastss	%xmm2, %ymm2
	vmaxss	%xmm0, %xmm1, %xmm0
	vbroadcastss	%xmm0, %ymm1
	vfmsub132ps	%ymm2, %ymm1, %ymm3
	vfmsub132ps	%ymm2, %ymm1, %ymm4
	vfmsub132ps	%ymm2, %ymm1, %ymm5
	vfmsub132ps	96(%r14), %ymm1, %ymm2
	vbroadcastss	(%rdx), %ymm1
	vmulps	%ymm1, %ymm3, %ymm3
	vmulps	%ymm1, %ymm4, %ymm4
	vmulps	%ymm1, %ymm5, %ymm5
	vmulps	%ymm1, %ymm2, %ymm1
	vbroadcastss	(%rsi), %ymm2
	vmaxps	%ymm3, %ymm2, %ymm3
	vmaxps	%ymm4, %ymm2, %ymm4
	vmaxps	%ymm5, %ymm2, %ymm5
	vmaxps	%ymm1, %ymm2, %ymm1
	vbroadcastss	(%rdi), %ymm2
	vminps	%ymm5, %ymm2, %ymm8
	vbroadcastss	(%r8), %ymm5
	vminps	%ymm3, %ymm2, %ymm6
	vminps	%ymm1, %ymm2, %ymm9
	vminps	%ymm4, %ymm2, %ymm7
	vaddps	%ymm5, %ymm6, %ymm1
	vaddps	%ymm5, %ymm7, %ymm2
	vaddps	%ymm5, %ymm8, %ymm3
	vaddps	%ymm5, %ymm9, %ymm4
	vroundps	$9, %ymm1, %ymm1
	vroundps	$9, %ymm2, %ymm2
	vroundps	$9, %ymm3, %ymm3
	vroundps	$9, %ymm4, %ymm4
	vsubps	%ymm2, %ymm7, %ymm7
	vsubps	%ymm3, %ymm8, %ymm8
	vsubps	%ymm1, %ymm6, %ymm6
	vsubps	%ymm4, %ymm9, %ymm14
	vcvttps2dq	%ymm1, %ymm1
	vcvttps2dq	%ymm2, %ymm2
	vcvttps2dq	%ymm3, %ymm3
	vcvttps2dq	%ymm4, %ymm4
	vmulps	%ymm6, %ymm12, %ymm9
	vmulps	%ymm7, %ymm12, %ymm10
	vmulps	%ymm12, %ymm8, %ymm11
	vmulps	%ymm12, %ymm14, %ymm12
	vfmadd213ps	%ymm15, %ymm13, %ymm6
	vfmadd213ps	%ymm15, %ymm13, %ymm7
	vfmadd213ps	%ymm15, %ymm13, %ymm8
	vfmadd213ps	%ymm15, %ymm14, %ymm13
	vbroadcastss	(%r12), %ymm14
	vpslld	$23, %ymm1, %ymm1
	vpslld	$23, %ymm2, %ymm2
	vpslld	$23, %ymm3, %ymm3
	vpslld	$23, %ymm4, %ymm4
	vfmadd213ps	%ymm14, %ymm9, %ymm6
	vfmadd213ps	%ymm14, %ymm10, %ymm7
	vfmadd213ps	%ymm14, %ymm11, %ymm8
	vfmadd213ps	%ymm14, %ymm12, %ymm13
	vbroadcastss	(%rbx), %ymm14
	vfmadd213ps	%ymm14, %ymm9, %ymm6
	vfmadd213ps	%ymm14, %ymm10, %ymm7
	vfmadd213ps	%ymm14, %ymm11, %ymm8
	vfmadd213ps	%ymm14, %ymm12, %ymm13
	vpbroadcastd	(%rbp), %ymm14
	movabsq	$.LCPI3_10, %rbp
	vbroadcastss	(%rbp), %ymm15
	vfmadd213ps	%ymm15, %ymm9, %ymm6
	vfmadd213ps	%ymm15, %ymm10, %ymm7
	vfmadd213ps	%ymm15, %ymm11, %ymm8
	vfmadd213ps	%ymm15, %ymm12, %ymm13
	vfmadd213ps	%ymm5, %ymm9, %ymm6
	vfmadd213ps	%ymm5, %ymm10, %ymm7
	vfmadd213ps	%ymm5, %ymm11, %ymm8
	vfmadd213ps	%ymm5, %ymm12, %ymm13
	vmulps	%ymm6, %ymm9, %ymm5
	vmulps	%ymm7, %ymm10, %ymm6
	vmulps	%ymm11, %ymm8, %ymm7
	vmulps	%ymm12, %ymm13, %ymm8
	vfmadd213ps	%ymm9, %ymm9, %ymm5
	vfmadd213ps	%ymm10, %ymm10, %ymm6
	vfmadd213ps	%ymm11, %ymm11, %ymm7
	vfmadd213ps	%ymm12, %ymm12, %ymm8
	vpaddd	%ymm1, %ymm14, %ymm9
	vpaddd	%ymm2, %ymm14, %ymm10
	vpaddd	%ymm3, %ymm14, %ymm11
	vpaddd	%ymm4, %ymm14, %ymm12
	vfmadd213ps	%ymm9, %ymm5, %ymm9
	vfmadd213ps	%ymm10, %ymm6, %ymm10
	vfmadd213ps	%ymm11, %ymm7, %ymm11
	vfmadd213ps	%ymm12, %ymm8, %ymm12
	vmovups	%ymm9, (%r14)
	vmovups	%ymm10, 32(%r14)
	vmovups	%ymm11, 64(%r14)
	vmovups	%ymm12, 96(%r14)
	vmovss	(%rcx,%rax,4), %xmm1
	vucomiss	%xmm1, %xmm0
	jbe	.LBB3_4
	vsubss	%xmm0, %xmm1, %xmm1
	vmulss	(%rdx), %xmm1, %xmm1
	vmovss	(%rsi), %xmm2
	vmovss	(%rdi), %xmm3
	vmovss	(%r8), %xmm4
	vmovss	(%r10), %xmm5
	movq	384(%rsp), %r14
	andq	368(%rsp), %r13
	movq	272(%rsp), %rdi
	vmovups	%ymm12, 80(%rsp)
	vmovups	%ymm11, 112(%rsp)
	vmovups	%ymm10, 144(%rsp)
	vmovups	%ymm9, 48(%rsp)
	vmaxss	%xmm1, %xmm2, %xmm1
	vminss	%xmm1, %xmm3, %xmm1
	vaddss	%xmm4, %xmm1, %xmm2
	vroundss	$9, %xmm2, %xmm2, %xmm2
	vsubss	%xmm2, %xmm1, %xmm1
	vfmadd213ss	(%r11), %xmm1, %xmm5
	vmulss	(%r9), %xmm1, %xmm3
	vcvttss2si	%xmm2, %edx
	shll	$23, %edx
	addl	$1065353216, %edx
	vfmadd213ss	(%r12), %xmm3, %xmm5
	movq	360(%rsp), %r12
	vmovd	%edx, %xmm2
	vfmadd213ss	(%rbx), %xmm3, %xmm5
	movq	432(%rsp), %rbx
	leaq	(%r12,%r14,4), %rdx
	vfmadd213ss	(%rbp), %xmm3, %xmm5
	vfmadd213ss	%xmm4, %xmm3, %xmm5
	vmulss	%xmm3, %xmm5, %xmm1
	vfmadd213ss	%xmm3, %xmm3, %xmm1
	vfmadd213ss	%xmm2, %xmm1, %xmm2
	vmulss	(%rdx,%r13,4), %xmm2, %xmm1
	vmovaps	%xmm2, 32(%rsp)
	vmovss	%xmm1, (%rdx,%r13,4)
	vmovss	%xmm0, (%rcx,%rax,4)
	vzeroupper
	callq	*%r15
	movq	%r15, %r8
	testq	%rbx, %rbx
	jle	.LBB3_5
	vmovups	48(%rsp), %ymm9
	vmovups	144(%rsp), %ymm10
	vmovups	112(%rsp), %ymm11
	vmovups	80(%rsp), %ymm12
	movq	424(%rsp), %rax
	cmpq	$3, %rbx
	ja	.LBB3_6
	vmovaps	32(%rsp), %xmm5
	movq	(%rsp), %r15
	movq	328(%rsp), %rbp
	xorl	%ecx, %ecx
	jmp	.LBB3_17
.LBB3_4:
	movq	%r15, %r8
	movq	360(%rsp), %r12
	movq	384(%rsp), %r14
	andq	368(%rsp), %r13
	movq	(%rsp), %r15
	movq	328(%rsp), %rbp
	movq	272(%rsp), %rdi
	jmp	.LBB3_19
.LBB3_5:
	vmovups	48(%rsp), %ymm9
	vmovups	144(%rsp), %ymm10
	vmovups	112(%rsp), %ymm11
	vmovups	80(%rsp), %ymm12
	movq	(%rsp), %r15
	movq	328(%rsp), %rbp
	xorl	%edi, %edi
	jmp	.LBB3_19
.LBB3_6:
	vmovaps	32(%rsp), %xmm5
	movq	(%rsp), %r15
	movq	328(%rsp), %rbp
	movabsq	$9223372036854775776, %rdx
	cmpq	$32, %rbx
	jae	.LBB3_8
	xorl	%ecx, %ecx
	jmp	.LBB3_13
.LBB3_8:
	vbroadcastss	%xmm5, %ymm0
	movq	%rbx, %rcx
	andq	%rdx, %rcx
	xorl	%esi, %esi
	.p2align	4
.LBB3_9:
	vmulps	(%rax,%rsi,4), %ymm0, %ymm1
	vmulps	32(%rax,%rsi,4), %ymm0, %ymm2
	vmulps	64(%rax,%rsi,4), %ymm0, %ymm3
	vmulps	96(%rax,%rsi,4), %ymm0, %ymm4
	vmovups	%ymm1, (%rax,%rsi,4)
	vmovups	%ymm2, 32(%rax,%rsi,4)
	vmovups	%ymm3, 64(%rax,%rsi,4)
	vmovups	%ymm4, 96(%rax,%rsi,4)
	addq	$32, %rsi
	cmpq	%rsi, %rcx
	jne	.LBB3_9
	cmpq	%rcx, %rbx
	je	.LBB3_11
	testb	$28, %bl
	je	.LBB3_17
.LBB3_13:
	addq	$28, %rdx
	movq	%rcx, %rsi
	vbroadcastss	%xmm5, %xmm0
	movq	%rdx, %rcx
	andq	%rbx, %rcx
	.p2align	4
.LBB3_14:
	vmulps	(%rax,%rsi,4), %xmm0, %xmm1
	vmovups	%xmm1, (%rax,%rsi,4)
	addq	$4, %rsi
	cmpq	%rsi, %rcx
	jne	.LBB3_14
	cmpq	%rcx, %rbx
	jne	.LBB3_17
.LBB3_11:
	xorl	%edi, %edi
	jmp	.LBB3_19
.LBB3_17:
	xorl	%edi, %edi
	.p2align	4
.LBB3_18:
	vmulss	(%rax,%rcx,4), %xmm5, %xmm0
	vmovss	%xmm0, (%rax,%rcx,4)
	incq	%rcx
	cmpq	%rcx, %rbx
	jne	.LBB3_18
.LBB3_19:
	vaddps	%ymm9, %ymm10, %ymm0
	movq	%r8, %rbx
	vaddps	%ymm0, %ymm11, %ymm0
	vaddps	%ymm0, %ymm12, %ymm0
	vmovups	%ymm0, (%rsp)
	vzeroupper
	callq	*%r8
	movq	392(%rsp), %rdi
	callq	*%rbx
	vmovups	(%rsp), %ymm1
	leaq	(%r12,%r14,4), %rax
	movq	%rbp, %rdi
	vextractf128	$1, %ymm1, %xmm0
	vaddps	%xmm1, %xmm0, %xmm0
	vshufpd	$1, %xmm0, %xmm0, %xmm1
	vaddps	%xmm0, %xmm1, %xmm0
	vmovshdup	%xmm0, %xmm1
	vaddss	%xmm0, %xmm1, %xmm0
	vaddss	(%rax,%r13,4), %xmm0, %xmm0
	vmovss	%xmm0, (%rax,%r13,4)
	vzeroupper
	callq	*%rbx
	movq	$0, (%r15)
	xorl	%eax, %eax
	addq	$184, %rsp
	.cfi_def_cfa_offset 56
	popq	%rbx
	.cfi_def_cfa_offset 48
	popq	%r12
	.cfi_def_cfa_offset 40
	popq	%r13
	.cfi_def_cfa_offset 32
	popq	%r14
	.cfi_def_cfa_offset 24
	popq	%r15
	.cfi_def_cfa_offset 16
	popq	%rbp
	.cfi_def_cfa_offset 8
	retq
.Lfunc_end3:
	.size	_ZN9pdcluster6engine9wide_rows12share_scoresB2v6B78c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughmJlMbAIpoAE5ArrayIfLi1E1C7mutable7alignedE24Literal_5bint_5d_2832_29f5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedEx5ArrayIfLi1E1C7mutable7alignedE, .Lfunc_end3-_ZN9pdcluster6engine9wide_rows12share_scoresB2v6B78c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughmJlMbAIpoAE5ArrayIfLi1E1C7mutable7alignedE24Literal_5bint_5d_2832_29f5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedEx5ArrayIfLi1E1C7mutable7alignedE
	.cfi_endproc

	.weak	NRT_incref
	.p2align	4
	.type	NRT_incref,@function
NRT_incref:
	testq	%rdi, %rdi
	je	.LBB4_2
	lock		incq	(%rdi)
.LBB4_2:
	retq
.Lfunc_end4:
	.size	NRT_incref, .Lfunc_end4-NRT_incref

	.weak	NRT_decref
	.p2align	4
	.type	NRT_decref,@function
NRT_decref:
	.cfi_startproc
	testq	%rdi, %rdi
	je	.LBB5_2
	#MEMBARRIER
	lock		decq	(%rdi)
	je	.LBB5_3
.LBB5_2:
	retq
.LBB5_3:
	movabsq	$NRT_MemInfo_call_dtor, %rax
	#MEMBARRIER
	jmpq	*%rax
.Lfunc_end5:
	.size	NRT_decref, .Lfunc_end5-NRT_decref
	.cfi_endproc

	.type	.const.share,@object
	.section	.lrodata,"al",@progbits
.const.share:
	.asciz	"share"
	.size	.const.share, 6

	.type	_ZN08NumbaEnv8__main__5shareB2v5B64c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAFkEM0AQAE5ArrayIfLi2E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx,@object
	.comm	_ZN08NumbaEnv8__main__5shareB2v5B64c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAFkEM0AQAE5ArrayIfLi2E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx,8,8
	.type	".const.missing Environment: _ZN08NumbaEnv8__main__5shareB2v5B64c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAFkEM0AQAE5ArrayIfLi2E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx",@object
	.p2align	4, 0x0
".const.missing Environment: _ZN08NumbaEnv8__main__5shareB2v5B64c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAFkEM0AQAE5ArrayIfLi2E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx":
	.asciz	"missing Environment: _ZN08NumbaEnv8__main__5shareB2v5B64c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAFkEM0AQAE5ArrayIfLi2E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx"
	.size	".const.missing Environment: _ZN08NumbaEnv8__main__5shareB2v5B64c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAFkEM0AQAE5ArrayIfLi2E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi2E1C7mutable7alignedEx", 247

	.type	".const.can't unbox array from PyObject into native value.  The object maybe of a different type",@object
	.p2align	4, 0x0
".const.can't unbox array from PyObject into native value.  The object maybe of a different type":
	.asciz	"can't unbox array from PyObject into native value.  The object maybe of a different type"
	.size	".const.can't unbox array from PyObject into native value.  The object maybe of a different type", 89

	.type	".const.Error creating Python tuple from runtime exception arguments",@object
	.p2align	4, 0x0
".const.Error creating Python tuple from runtime exception arguments":
	.asciz	"Error creating Python tuple from runtime exception arguments"
	.size	".const.Error creating Python tuple from runtime exception arguments", 61

	.type	".const.unknown error when calling native function",@object
	.p2align	4, 0x0
".const.unknown error when calling native function":
	.asciz	"unknown error when calling native function"
	.size	".const.unknown error when calling native function", 43

	.type	".const.Error creating Python tuple from runtime exception arguments.1",@object
	.p2align	4, 0x0
".const.Error creating Python tuple from runtime exception arguments.1":
	.asciz	"Error creating Python tuple from runtime exception arguments"
	.size	".const.Error creating Python tuple from runtime exception arguments.1", 61

	.type	".const.unknown error when calling native function.2",@object
	.p2align	4, 0x0
".const.unknown error when calling native function.2":
	.asciz	"unknown error when calling native function"
	.size	".const.unknown error when calling native function.2", 43

	.type	".const.<numba.core.cpu.CPUContext>",@object
	.p2align	4, 0x0
".const.<numba.core.cpu.CPUContext>":
	.asciz	"<numba.core.cpu.CPUContext>"
	.size	".const.<numba.core.cpu.CPUContext>", 28

	.type	_ZN08NumbaEnv9pdcluster6engine9wide_rows12share_scoresB2v6B78c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughmJlMbAIpoAE5ArrayIfLi1E1C7mutable7alignedE24Literal_5bint_5d_2832_29f5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedEx5ArrayIfLi1E1C7mutable7alignedE,@object
	.comm	_ZN08NumbaEnv9pdcluster6engine9wide_rows12share_scoresB2v6B78c8tJTIeFIjxB2IKSgI4CrvSCKg1MMbCQQPKkLTj8gEEF9aYtuj_2br1UFS6rWawKAughmJlMbAIpoAE5ArrayIfLi1E1C7mutable7alignedE24Literal_5bint_5d_2832_29f5ArrayIfLi1E1C7mutable7alignedE5ArrayIfLi1E1C7mutable7alignedEx5ArrayIfLi1E1C7mutable7alignedE,8,8
	.type	_ZN08NumbaEnv5numba7cpython8builtins6ol_max12_3clocals_3e4implB2v9B74c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAYkQ91Dxg0IFZmgA_3dE15StarArgUniTupleIfLi2EE,@object
	.comm	_ZN08NumbaEnv5numba7cpython8builtins6ol_max12_3clocals_3e4implB2v9B74c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAYkQ91Dxg0IFZmgA_3dE15StarArgUniTupleIfLi2EE,8,8
	.type	_ZN08NumbaEnv5numba7cpython8builtins6ol_min12_3clocals_3e4implB3v10B74c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAYkQ91Dxg0IFZmgA_3dE15StarArgUniTupleIfLi2EE,@object
	.comm	_ZN08NumbaEnv5numba7cpython8builtins6ol_min12_3clocals_3e4implB3v10B74c8tJTIeFIjxB2IKSgI4CrvQCk0Z4yRYcWsCAgXrKFt1X1eogKfVaTWDAYkQ91Dxg0IFZmgA_3dE15StarArgUniTupleIfLi2EE,8,8
	.section	".note.GNU-stack","",@progbits
